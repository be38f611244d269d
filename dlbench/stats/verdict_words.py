"""The words of all verdicts, once: what each outcome is called where a question was asked.

By question a table from an outcome (`dlbench.stats.verdict.Outcome`), or from a state beside the outcomes that allows
no comparison, to its answer: the word in JSON and CSV, which users' CI reads and which never changes, the words in
sentences and in the narrow cells of tables, and the tone from which marks, ratings and the colours of charts follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Tone = Literal["good", "bad", "open"]


@dataclass(frozen=True)
class Answer:
    """One outcome, or state, of a question."""

    word: str  # In JSON and CSV.
    tone: Tone = "open"
    text: str = ""  # In sentences; empty: the word.
    cell: str = ""  # In a narrow table; empty: as in sentences.

    @property
    def in_sentence(self) -> str:
        """Returns the words in a sentence."""
        return self.text or self.word

    @property
    def in_cell(self) -> str:
        """Returns the words in a narrow table."""
        return self.cell or self.in_sentence


Question = Mapping[str, Answer]

SETTING_MARGIN = 0.02  # Differences within this share, interval and all, are no reason to choose a setting.
SETTING_MARGIN_TEXT = f"{SETTING_MARGIN * 100:g} %"
QUALITY_OPEN = "quality not compared"  # Of ranks that train apart, whose updates are not those of replicas.

GATE: Question = {
    "worse": Answer("regressed", "bad"),
    "insufficient": Answer("insufficient"),
    "undecided": Answer("inconclusive"),
    "better": Answer("improved", "good"),
    "equal": Answer("equivalent", "good"),
}
"""Runs against a baseline."""
FLOOR: Question = {
    "worse": Answer("missed", "bad"),
    "insufficient": Answer("insufficient", text="cannot say"),
    "undecided": Answer("inconclusive", text="cannot say"),
    "better": Answer("met", "good"),
}
"""Runs against a throughput that they must reach."""
GATE_TONES: Mapping[str, Tone] = {one.word: one.tone for table in (GATE, FLOOR) for one in table.values()}
"""Tones of the gate's words in JSON: bad is a failure of a test, good a pass, open an error."""
GATE_ORDER = ("regressed", "missed", "insufficient", "inconclusive", "improved", "equivalent", "met")
"""The first that is there stands for many."""

SETTING: Question = {
    "baseline": Answer("baseline"),
    "better": Answer("faster", "good"),
    "faster per step": Answer("faster per step", text=f"faster per step; {QUALITY_OPEN}"),
    "worse": Answer("slower", "bad"),
    "equal": Answer("equal", text=f"equal within {SETTING_MARGIN_TEXT}"),
    "undecided": Answer("undecided"),
    "insufficient": Answer("insufficient"),
    "target missed": Answer("target missed"),
    "no figure": Answer("no figure"),
}
"""A setting against the baseline, by throughput."""
SETTING_TO_TARGET: Question = {
    **SETTING,
    "better": Answer("faster", "good", "faster to the target"),
    "faster per step": Answer("faster per step"),
    "worse": Answer("slower", "bad", "slower to the target"),
    "equal": Answer("equal", text="not told apart"),
    "undecided": Answer("undecided", text="not told apart"),
    "insufficient": Answer("insufficient", text="not told apart"),
}
"""The same by the time to a target."""
LADDER_STEP: Question = {
    "better": Answer("faster", "good", "pays", "yes"),
    "equal": Answer("equal", text=f"adds nothing (within {SETTING_MARGIN_TEXT})", cell="no"),
    "worse": Answer("slower", "bad", "costs", "slower"),
    "faster per step": Answer("faster per step", text=f"pays per step, {QUALITY_OPEN}", cell="faster per step"),
    "undecided": Answer("undecided", text="not certain", cell="unsure"),
    "insufficient": Answer("insufficient", text="too few repeats to tell", cell="too few"),
    "no figure": Answer("no figure"),
    "target missed": Answer("target missed"),
    "baseline": Answer("baseline", cell="–"),
}
"""What a step of a ladder adds to those before it, in the order of the sentence."""
AXIS: Question = {
    "better": Answer("matters"),
    "equal": Answer("no effect", text=f"no effect within {SETTING_MARGIN_TEXT}"),
    "undecided": Answer("undecided"),
    "insufficient": Answer("insufficient"),
}
"""Whether a swept key matters, in the order of the sentence."""
DECOMPOSITION: Question = {
    "better": Answer("differ"),
    "worse": Answer("differ"),
    "equal": Answer("agree"),
    "undecided": Answer("undecided"),
    "insufficient": Answer("insufficient"),
}
"""Whether what is saved without a phase agrees with the length of the phase."""
PRECISION: Question = {
    "better": Answer("faster", "good", "is faster than"),
    "worse": Answer("slower", "bad", "is slower than"),
    "equal": Answer("equal", text="cannot be distinguished from"),
    "undecided": Answer("undecided", text="cannot be distinguished from"),
    "insufficient": Answer("insufficient", text="has too few runs for a verdict against"),
}
"""A precision against the reference."""
HOST: Question = {
    "worse": Answer("slow", "bad"),
    "slow link": Answer("slow link", "bad", "slow link or NIC"),
    "slow and slow link": Answer("slow and slow link", "bad", "slow and slow link or NIC"),
    "suspected": Answer("suspected"),
    "undecided": Answer("not shown to be slow"),
    "insufficient": Answer("too few sessions"),
    "not used lately": Answer("not used lately"),
}
"""A host against the other hosts of its runs: its own work, and the moment at which it leaves exchanges."""
TREND: Question = {
    "worse": Answer("regression", "bad"),
    "better": Answer("improvement", "good"),
    "equal": Answer("no change"),
    "insufficient": Answer("too few nights"),
}
"""A level of a trend against the one before."""
CAUSE: Question = {
    "found": Answer("found", "bad", "main cause"),
    "likely": Answer("likely", "bad", "likely cause"),
    "partial": Answer("partial", "bad", "certain"),
    "baseline": Answer("baseline"),
    "no loss": Answer("no loss", "good"),
    "small loss": Answer("small loss", "good"),
    "above ideal": Answer("above ideal"),
    "too few runs": Answer("too few runs"),
    "within noise": Answer("within noise"),
}
"""What is lost of the efficiency, and whether a part of the step is shown to lose it; the text is what that part is
called."""
