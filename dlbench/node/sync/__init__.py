"""Gradient exchange."""
