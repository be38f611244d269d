"""The words of all verdicts, a table per question. Words in JSON and CSV never change, because users' CI reads them."""

from __future__ import annotations

from collections.abc import Mapping

from dlbench.stats.verdict import Question, Tone, Wording

SETTING_MARGIN = 0.02  # If the interval of a difference is within this fraction, a setting has no advantage.
SETTING_MARGIN_TEXT = f"{SETTING_MARGIN * 100:g} %"
QUALITY_OPEN = "quality not compared"  # For local SGD, whose updates are not those of data parallel replicas.

GATE: Question = {  # Runs against a baseline.
    "worse": Wording("regressed", "bad"),
    "insufficient": Wording("insufficient"),
    "undecided": Wording("inconclusive"),
    "better": Wording("improved", "good"),
    "equal": Wording("equivalent", "good"),
}
FLOOR: Question = {  # Runs against a throughput that they must reach.
    "worse": Wording("missed", "bad"),
    "insufficient": Wording("insufficient", text="cannot say"),
    "undecided": Wording("inconclusive", text="cannot say"),
    "better": Wording("met", "good"),
}
GATE_TONES: Mapping[str, Tone] = {wording.word: wording.tone for wording in (*GATE.values(), *FLOOR.values())}
"""Tones of the gate's words in JSON: bad is a failure of a test, good a pass, open an error."""
GATE_ORDER = ("regressed", "missed", "insufficient", "inconclusive", "improved", "equivalent", "met")
"""Words by precedence: the verdict of many comparisons is the first of these that one of them has."""

SETTING: Question = {  # A setting against the baseline, by throughput.
    "baseline": Wording("baseline"),
    "better": Wording("faster", "good"),
    "faster per step": Wording("faster per step", text=f"faster per step; {QUALITY_OPEN}"),
    "worse": Wording("slower", "bad"),
    "equal": Wording("equal", text=f"equal within {SETTING_MARGIN_TEXT}"),
    "undecided": Wording("undecided"),
    "insufficient": Wording("insufficient"),
    "target missed": Wording("target missed"),
    "no figure": Wording("no figure"),
}
SETTING_TO_TARGET: Question = {  # A setting against the baseline, by the time to a target.
    **SETTING,
    "better": Wording("faster", "good", "faster to the target"),
    "faster per step": Wording("faster per step"),
    "worse": Wording("slower", "bad", "slower to the target"),
    "equal": Wording("equal", text="undecided"),
    "undecided": Wording("undecided"),
    "insufficient": Wording("insufficient", text="undecided"),
}
LADDER_STEP: Question = {
    "better": Wording("faster", "good", "pays", "yes"),
    "equal": Wording("equal", text=f"adds nothing (within {SETTING_MARGIN_TEXT})", cell="no"),
    "worse": Wording("slower", "bad", "costs", "slower"),
    "faster per step": Wording("faster per step", text=f"pays per step, {QUALITY_OPEN}", cell="faster per step"),
    "undecided": Wording("undecided", cell="unsure"),
    "insufficient": Wording("insufficient", text="too few repeats to tell", cell="too few"),
    "no figure": Wording("no figure"),
    "target missed": Wording("target missed"),
    "baseline": Wording("baseline", cell="–"),
}
"""The effect of a step of a ladder on top of the steps before it, in the order of the sentence."""
AXIS: Question = {  # Whether a swept key matters, in the order of the sentence.
    "better": Wording("matters"),
    "equal": Wording("no effect", text=f"no effect within {SETTING_MARGIN_TEXT}"),
    "undecided": Wording("undecided"),
    "insufficient": Wording("insufficient"),
}
DECOMPOSITION: Question = {  # Whether the time saved without a phase agrees with the length of the phase.
    "better": Wording("differ"),
    "worse": Wording("differ"),
    "equal": Wording("agree"),
    "undecided": Wording("undecided"),
    "insufficient": Wording("insufficient"),
}
PRECISION: Question = {  # A precision against the reference.
    "better": Wording("faster", "good", "is faster than"),
    "worse": Wording("slower", "bad", "is slower than"),
    "equal": Wording("equal", text="cannot be distinguished from"),
    "undecided": Wording("undecided", text="cannot be distinguished from"),
    "insufficient": Wording("insufficient", text="has too few runs for a verdict against"),
}
HOST: Question = {  # A host against the other hosts of its runs, by its own work and by the end of its exchanges.
    "worse": Wording("slow", "bad"),
    "slow link": Wording("slow link", "bad", "slow link or NIC"),
    "slow and slow link": Wording("slow and slow link", "bad", "slow and slow link or NIC"),
    "suspected": Wording("suspected"),
    "undecided": Wording("not shown to be slow"),
    "insufficient": Wording("too few sessions"),
    "not used lately": Wording("not used lately"),
}
TREND: Question = {  # A level of a trend against the one before.
    "worse": Wording("regression", "bad"),
    "better": Wording("improvement", "good"),
    "equal": Wording("no change"),
    "insufficient": Wording("too few nights"),
}
CAUSE: Question = {
    "found": Wording("found", "bad", "main cause"),
    "likely": Wording("likely", "bad", "likely cause"),
    "partial": Wording("partial", "bad", "certain"),
    "baseline": Wording("baseline"),
    "no loss": Wording("no loss", "good"),
    "small loss": Wording("small loss", "good"),
    "above ideal": Wording("above ideal"),
    "too few runs": Wording("too few runs"),
    "within noise": Wording("within noise"),
}
"""The loss of efficiency, and whether a part of the step is shown to cause it; the text is the name of that part."""
