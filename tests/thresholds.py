"""The thresholds that decide what dlbench says: where each comes from, and what would change at half of it.

Values are read from the code, so that the table in the documentation cannot say another; a threshold that is renamed
or goes makes `python -m tests.reference` fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from importlib import import_module


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One constant."""

    module: str
    """Within `dlbench`."""
    name: str
    """Attribute of the module, dotted where it is a field's default."""
    decides: str
    why: str
    halved: str

    @property
    def value(self) -> float:
        """As the code has it."""
        found = reduce(getattr, self.name.split("."), import_module(f"dlbench.{self.module}"))
        assert isinstance(found, int | float)
        return found


THRESHOLDS = (
    Threshold(
        module="stats.estimates",
        name="MIN_RUNS",
        decides="runs below which nothing is compared",
        why="the first number at which the range of the runs attains 93.75 %",
        halved="with three runs no exact interval attains more than 75 %",
    ),
    Threshold(
        module="stats.pairing",
        name="ENOUGH_SHARE",
        decides="share of the smaller side that must have partners, below five pairs, to compare pair by pair",
        why="both sides of five repeats may lose one run each",
        halved="sides that share few repeats by chance are compared by those alone",
    ),
    Threshold(
        module="stats.multiplicity",
        name="LEVEL",
        decides="chance of any false difference in the sweeps of a report, and of any false cause",
        why="one in twenty, as of every interval",
        halved="one in forty; 15 settings need about 11 % more repeats",
    ),
    Threshold(
        module="views.sweep.settings",
        name="MARGIN",
        decides="differences between settings that are no reason to choose",
        why="the gate tolerates as much by default",
        halved="`equal` takes about four times the repeats, and so do decisions at the margin",
    ),
    Threshold(
        module="gate.verdicts",
        name="Rule.tolerance",
        decides="slowdown beyond which the gate fails (`--tolerance`)",
        why="small against the slowdown that five to ten repeats at a scatter of 1 % find",
        halved="slowdowns of 1 to 2 % can fail it",
    ),
    Threshold(
        module="analysis.sessions",
        name="MIN_SESSIONS",
        decides="sessions of a side, or of a history, that show how far sessions scatter",
        why="a change is found at 4.7 standard errors with five, 5.5 with four, 8.0 with three (Student's t)",
        halved="with three, only changes of eight times the scatter fail the gate",
    ),
    Threshold(
        module="analysis.sessions",
        name="PAUSE_S",
        decides="seconds without a run after which another session begins",
        why="longer than from an evening to the morning after, shorter than from one night to the next",
        halved="an evening and the morning after are two looks at one state of the machine",
    ),
    Threshold(
        module="analysis.slow_nodes",
        name="FALSE_SHARE",
        decides="share of the hosts called slow that are not, on average",
        why="one in twenty, as of every interval",
        halved="hosts that are barely slower than 3 % take more nights to be named",
    ),
    Threshold(
        module="history.change_points",
        name="MIN_EVIDENCE",
        decides="Bayes factor of a change point, before all trends are counted",
        why="with looks every fourth night for 110 nights, six trends of a hundred whose nights resemble each other "
        "(autocorrelation 0.5) show a false one",
        halved="changes are named a few nights earlier, and about twice as many are none",
    ),
    Threshold(
        module="history.change_points",
        name="NAMED",
        decides="share of ordinary nights beyond the usual range",
        why="about four nights of a year",
        halved="the usual range is wider by a tenth",
    ),
    Threshold(
        module="views.decomposition",
        name="MARGIN",
        decides="share of a step within which difference and phase agree",
        why="losses below 1 % are not explained",
        halved="`agree` takes about four times the repeats; more is undecided",
    ),
    Threshold(
        module="views.causes.numbers",
        name="WORTH_EXPLAINING",
        decides="share of the ideal whose loss is given a cause",
        why="five interleaved repeats that scatter by 0.6 % resolve it",
        halved="losses of 0.5 to 1 % are diagnosed too, and most of them are within the noise",
    ),
    Threshold(
        module="views.causes.numbers",
        name="BOUND_SHARE",
        decides="share of the loss from which on runs are called bound by its main cause, such as network-bound",
        why="a smaller part leaves more than twice as much to all others",
        halved="runs are called network-bound for a sixth of what they lose",
    ),
    Threshold(
        module="views.quality.numbers",
        name="MOST_WARMUP",
        decides="times a measured step that a warm-up step may take before a run's time contradicts its throughput",
        why="first steps choose algorithms and fill queues; a run of a minute or more has few of them",
        halved="short runs whose first steps are slow raise `contradiction`",
    ),
    Threshold(
        module="views.stalls",
        name="NEGLIGIBLE",
        decides="share of a step below which an input stall costs nothing worth words",
        why="as above",
        halved="more stalls are undecided",
    ),
    Threshold(
        module="analysis.slow_nodes",
        name="SLOW",
        decides="times the others' work above which a host is slow",
        why="the least effect that dlbench promises to see",
        halved="half the excess, 1.5 %, counts: hosts that differ as like machines do are excluded",
    ),
    Threshold(
        module="projection.refusals",
        name="UNSTABLE",
        decides="scatter of the runs of a point beyond which nothing is projected from it",
        why="far beyond what runs of one state of a machine scatter by",
        halved="points of a busy machine are refused",
    ),
    Threshold(
        module="analysis.stragglers",
        name="IN_TIME_SHARE",
        decides="a rank that waits this share of the longest wait of a step is in time",
        why="half-way between the rank that came last and those that came first",
        halved="fewer ranks are late, and the late are charged with less",
    ),
    Threshold(
        module="views.doubts",
        name="NOISY_CV",
        decides="scatter of steps within a run that raises the warning `noisy-steps`",
        why="the median of such a run is hardly a typical step",
        halved="one step in sixty of twice the length raises it",
    ),
    Threshold(
        module="analysis.core_load",
        name="LOADED",
        decides="share of the ranks' cores, used by other processes or taken by the hypervisor, that raises a warning",
        why="steps may take longer by as much: more than gate and sweeps tolerate",
        halved="a busy daemon raises it; the launcher itself takes 0.1 % of a core",
    ),
    Threshold(
        module="comm.choice",
        name="STAY_WITHIN",
        decides="how much slower than the fastest an algorithm may be and count as good as it",
        why="a choice among such algorithms gains at most this share of a message",
        halved="more winners, many of which no training would notice",
    ),
    Threshold(
        module="perfmodels.extrapolation",
        name="PRIOR_SCALE",
        decides="error of a model per square root of a doubling beyond its points, before any point was held out",
        why="it counts as two points, so that what was held out soon outweighs it",
        halved="bands of models without a held-out point are half as wide, and those with one too narrow at first",
    ),
    Threshold(
        module="specs.comm",
        name="POOR_MEDIAN",
        decides="median error of a fit beyond which predictions of an algorithm are no advice",
        why="algorithms to choose among differ by less",
        halved="fits of a noisy machine give no advice",
    ),
    Threshold(
        module="comm.choice",
        name="RATE_SHARE",
        decides="share of the asymptotic rate that a fused message reaches",
        why="n_90 = 9 x start-up / time per byte",
        halved="messages eleven times as small are recommended",
    ),
    Threshold(
        module="perfmodels.link_fit",
        name="CLEAR_GAIN",
        decides="fall of the Bayesian information criterion for which a cost model gets another term",
        why="very strong evidence (Kass and Raftery, JASA 90, 1995) where points are independent, which ours are not",
        halved="terms that follow the noise of few runs",
    ),
)
