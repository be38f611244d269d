"""Telemetry: a subject of the scaling report."""
