"""Memory: a subject of the scaling report."""
