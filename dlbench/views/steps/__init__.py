"""Steps: a subject of the scaling report."""
