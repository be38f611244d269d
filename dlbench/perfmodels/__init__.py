"""Closed forms: what a training takes, and what share of the hardware it uses. Pure functions of numbers."""
