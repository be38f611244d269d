"""Scaling: a subject of the scaling report."""
