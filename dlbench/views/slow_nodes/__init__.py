"""Slow nodes: a subject of the scaling report."""
