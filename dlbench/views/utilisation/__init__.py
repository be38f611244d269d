"""Utilisation: a subject of the scaling report."""
