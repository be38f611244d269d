"""Data path: a subject of the scaling report."""
