"""Waterfall: a subject of the scaling report."""
