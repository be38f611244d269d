"""Energy: a subject of the scaling report."""
