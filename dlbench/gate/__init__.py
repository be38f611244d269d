"""The gate: is B slower than A, by how much, and how sure is that?

Every run gives one number for each metric. `evidence` makes units of them (pairs, sessions) and tests, says by how much
and what could be seen, and `verdicts` decides. `content` says what may be
compared, `sides` reads runs, `baseline_values` a baseline file, `matching` and `pairs` bring both sides together,
`comparison` is the whole.
"""

from __future__ import annotations

from dlbench.gate.comparison import Comparison, compare_pairs, compare_sides

__all__ = ["Comparison", "compare_pairs", "compare_sides"]
