"""Machine: a subject of the scaling report."""
