"""Decomposition: a subject of the scaling report."""
