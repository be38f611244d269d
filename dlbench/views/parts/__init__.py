"""Parts: a subject of the scaling report."""
