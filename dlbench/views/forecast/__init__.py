"""Forecast: a subject of the scaling report."""
