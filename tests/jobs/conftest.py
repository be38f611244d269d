"""Fixtures of the tests of jobs."""

from __future__ import annotations

from tests.support.programs import program

__all__ = ["program"]
