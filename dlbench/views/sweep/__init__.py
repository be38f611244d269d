"""Sweep: a subject of the scaling report."""
