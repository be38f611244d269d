"""Texts of the report on its methods, and on subjects that it does not show."""

from __future__ import annotations

from dlbench.report.document import Missing
from dlbench.report.wording import INTERVALS
from dlbench.stats.estimates import MIN_RUNS
from dlbench.views.model import ReportGroup

_METHODS = {
    "Runs that count": "Only runs whose sanity checks passed (finite loss, equal parameters on all ranks, equal work) "
    "and whose step files are complete. All other runs are listed with the reason and have no figures. Warm-up steps "
    "are recorded but not used.",
    "Throughput": "Samples of all measured steps of all ranks, divided by the longest measured time of any rank.",
    "Step time": "The time of a step is that of its slowest rank. A run's step time is the median over its measured "
    "steps; p95 is their 95th percentile.",
    "Means and intervals": "The run is the experimental unit, not the step. Throughput, step times, epochs, times to "
    "accuracy and energy per sample are geometric means over runs; ratios and differences are made of these means. "
    f"Counts, memory and shares are medians, or means if they must sum. {INTERVALS} For two to four runs the range is "
    "printed, as (low to high), with its level, and the comparison is called insufficient; a single run has no "
    "interval. Values are rounded so that half the interval has one or two significant digits, whole numbers at least; "
    "CSV and JSON have all digits.",
    "Speed-up and efficiency": "Speed-up is throughput divided by the baseline's throughput. Efficiency is speed-up "
    "divided by the ratio of rank counts: for weak scaling (fixed batch per rank) Thr(p) / ((p/p0) Thr(p0)), for "
    "strong scaling (fixed global batch) p0 T(p0) / (p T(p)). The baseline is the smallest rank count measured, and is "
    "always named. Interleaved repeats are compared in pairs, so that drift of the machine cancels; a run whose "
    "partner failed is left out, and counted next to the interval.",
    "Serial fraction": "For strong scaling, Karp and Flatt's experimentally determined serial fraction (1/S - 1/k) / "
    "(1 - 1/k) with k = p/p0 (Communications of the ACM 33(5), 1990). A fraction that grows with the rank count points "
    "to overhead of the exchange rather than to serial work.",
    "Projections": "To two and four times the largest rank count. With fitted costs of the network (--network), a "
    "projection is the account of the largest point plus the changes by these costs and by the scatter of nodes. "
    "Without, T = c0 ideal + c1 x is fitted to the points, with x the logarithm of the nodes or 1 - 1/nodes, whichever "
    "predicts the held-out largest point better, up to four times as far. Intervals are the middle 80 % of 1,000 draws "
    "of runs, costs, nodes and the model's error, which grows with each doubling and is estimated from held-out "
    "points. A projection that needs a kind of measurement that is missing is refused, with its remedy. Projections "
    "are not measurements and never share a line, a column or a headline with them.",
    "Published figures": "Drawn as a reference line only if the work is the same: preset with the published "
    "configuration, network, batch per rank, precision class, real or synthetic data, weak or strong scaling. The "
    "hardware differs.",
    "Account of the step": "A part's seconds are its mean share of the step x the geometric mean step, so parts sum to "
    "the step, and their losses to 1 - efficiency, exactly. The step is that of the ranks that are not stragglers; the "
    "extra time of stragglers is waiting for stragglers. Exposed exchange = on the wire (in each step the minimum over "
    "ranks, with negotiation and copies; for collectives within passes and update only sums over the steps are "
    "measured, and each rank's computing is assumed even) + waiting. These collectives, waiting for parameters, "
    "recompute and throttling are not part of forward, backward and optimizer; host is the time between phases; "
    "imbalance is the slowest rank's mean step minus that of all ranks. A single rank exchanges nothing: the time of "
    "that phase is host. Intervals: delta method. Baseline parts are for the same number of samples per rank.",
    "Messages of the exchange": "If a run recorded them: the time in which at least one message was under way, "
    "during the backward pass or after it, by the exchange's clock (rank 0) or Horovod's timeline in a window of "
    "steps; bytes by the algorithm that ran. The least time after the backward pass is that of a model: messages "
    "follow one another, and each starts when its last gradient is ready (wait-free back-propagation; Shi, Chu and Li, "
    "INFOCOM 2019). Its inputs are the measured times at which gradients were ready, and a line for the cost of a "
    "message (start-up and seconds per byte); the best way to merge neighbouring gradients is found exactly. The line "
    "was timed before training or given; otherwise it is fitted by relative errors to the messages of the run, which "
    "must have at least three sizes. Efficiency with it: if only this exchange cost time. If a run did better than the "
    "model, there is no bound.",
    "Settings compared": "In a swept series, settings are compared at equal rank count, preset, precision and data, in "
    "pairs of interleaved repeats, so that drift of the machine cancels. The default is the setting whose swept keys "
    "are at dlbench's defaults (the first swept value for the engine and for keys of the workload or system); if the "
    "sweep does not have it, the first setting. Intervals are per comparison. A setting is faster or slower if its "
    "interval does not contain 1 and Student's paired t test on log ratios stays below 0.05 after Holm's procedure "
    "over all settings and values of keys of all rank counts and sweeps of the report; equal if the interval is "
    "within 2 % of 1; otherwise undecided. The gain of the best is corrected for the choice: low end simultaneous over "
    "the settings (Bonferroni, pooled scatter), high end that of one comparison, value in the middle; the measured "
    f"gain is printed next to it. Fewer than {MIN_RUNS} repeats decide nothing.",
    "Effects of keys": "The effect of a key is the ratio of throughput between two of its values, as the geometric "
    "mean over all combinations of the other keys that ran with both, taken in each repeat; repeats are the sample. "
    "Combinations in which a key has no effect by design are left out. Verdicts as for settings, in the same family. "
    "Break-even of Horovod's autotuner: the cost of its search over the gain of a step against the baseline.",
    "Training to a quality": "Time to quality is the time from the start of training to the end of the first "
    "evaluation that met the target, with evaluations, checkpoints and warm-up steps. The target may have been met up "
    "to one evaluation interval earlier. A run that did not meet the target, or whose sanity checks failed, is counted "
    "and never left out; a rank count with such a run has no speed-up of the time to quality, because the time of that "
    "run is not known.",
    "Faster steps, more samples": "Speed-up of the time to quality = throughput over the baseline's x (samples to "
    "quality of the baseline / those here) x rest. The rest is the time of evaluation, checkpoints, warm-up steps and "
    "waits in addition to the measured steps, at the baseline over here. The identity holds in each run; all four are "
    "ratios of geometric means over runs, which keep it exactly (Fleming and Wallace, Communications of the ACM 29(3), "
    "1986).",
    "Gradient noise scale": "McCandlish et al. 2018: tr(Sigma)/|G|^2 from the squared norms of gradients of two batch "
    "sizes, numerator and denominator averaged over steps. Well below it, twice the batch nearly halves the steps; "
    "well above it, twice the batch nearly doubles the samples: S = S_min (1 + B_n/B), E = E_min (1 + B/B_n). It is a "
    "mean over the run and grows during training; the law assumes a learning rate tuned to each batch, and equal "
    "curvature in all directions.",
    "Model FLOPs utilisation": "FLOPs of training on one sample x samples per second / (ranks x peak of a rank). FLOPs "
    "are those of the model's tensor products, forward and twice that backward, without recomputing (Chowdhery et al. "
    "2022, appendix B). The peak is declared or from a data sheet, at the precision in force; it is printed with its "
    "source.",
    "Time to train": "Samples of the recipe over the measured throughput, plus the start of the run: an estimate. It "
    "does not say whether the training would converge. Hours are those of all GPUs (nodes, cores, ranks) of a run. Two "
    "rank counts are distinguished by the ratio of their runs' times, as speed-ups are.",
    "Runs that may be compared": "Runs form one group only if workload, preset, every setting of the plan, goal, "
    "engine, precision, data source, batch, launcher, system, cores per rank and device agree. For strong scaling the "
    "global batch must agree.",
}
METHODS: tuple[tuple[str, str], ...] = tuple(_METHODS.items())  # Title and text.


def not_shown(groups: tuple[ReportGroup, ...]) -> tuple[Missing, ...]:
    """Returns subjects that no view is about, and what would produce them."""
    missing: list[Missing] = []
    if groups and all(len(group.points) == 1 for group in groups):
        text = "needs the same workload at two or more rank counts, e.g. --ranks 1,2,4."
        missing.append(Missing(view="scaling", title="Scaling", text=text))
    text = "not measured by training runs: dlbench comm run measures every algorithm and library on the same ranks."
    missing.append(Missing(view="collectives", title="Collective bandwidth", text=text))
    return tuple(missing)
