"""Systems: a subject of the scaling report."""
