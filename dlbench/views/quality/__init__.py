"""Quality: a subject of the scaling report."""
