"""Watching a run from beside it: see docs/architecture.md."""
