"""Layers: a subject of the scaling report."""
