"""Precision: a subject of the scaling report."""
