"""Where the tests' files lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout."""
SUPPORT = ROOT / "tests" / "support"
DATA = ROOT / "tests" / "data"
GOLDEN = ROOT / "tests" / "golden"
