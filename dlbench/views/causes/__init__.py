"""Causes: a subject of the scaling report."""
