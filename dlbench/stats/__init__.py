"""Estimates: values with their intervals, and many comparisons at once."""
