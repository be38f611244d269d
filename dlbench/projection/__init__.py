"""Projection: what rank counts that were not measured would do. Nothing else in dlbench extrapolates training runs."""
