"""Exchange: a subject of the scaling report."""
