"""Noise: a subject of the scaling report."""
