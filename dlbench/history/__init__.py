"""Runs of months in one store, and what changed over time."""
