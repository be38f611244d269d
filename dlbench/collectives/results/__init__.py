"""Measurements of collectives become tables, fits, choices and predictions."""
