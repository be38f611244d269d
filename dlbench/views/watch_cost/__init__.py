"""Watch cost: a subject of the scaling report."""
