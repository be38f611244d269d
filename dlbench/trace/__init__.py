"""Watches the machine, never changes it."""
