"""Differences: a subject of the scaling report."""
