"""Benchmarks: they print figures and never fail a build. Run with ``make bench [AREA=spine]``."""
