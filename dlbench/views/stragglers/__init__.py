"""Stragglers: a subject of the scaling report."""
