"""Texts of the report on its methods, and on subjects that it does not show."""

from __future__ import annotations

from dlbench.report.document import Missing
from dlbench.report.wording import INTERVALS
from dlbench.stats.estimates import MIN_RUNS
from dlbench.views.model import ReportGroup

_METHODS = {
    "Which runs count": "Only runs whose sanity checks held (finite loss, equal parameters on all ranks, equal work) "
    "and whose step files are whole. All others are listed with the reason and yield no figure. Warm-up steps are "
    "recorded and left out.",
    "Throughput": "Samples of all measured steps of all ranks, divided by the longest measured time of any rank.",
    "Step time": "In each step the slowest rank counts. A run's step time is the median over its measured steps; p95 "
    "is their 95th percentile.",
    "Means and intervals": "The run is the experimental unit, not the step. Throughput is the geometric mean over "
    "runs, and so is whatever else has a ratio or a difference next to it: step times, epochs, times to accuracy, "
    "energy per sample. Ratios and differences are those of these means. Counts, memory and shares by themselves are "
    f"medians, or means where they must sum. {INTERVALS} With two to four runs their range is printed, as (low to "
    "high), with the level that it attains, and the comparison is called insufficient; a single run has no interval. "
    "Numbers are printed to the decimal place at which half the interval has one or two significant digits, whole "
    "numbers at least; CSV and JSON hold all digits.",
    "Speed-up and efficiency": "Speed-up is throughput divided by the baseline's throughput. Efficiency is speed-up "
    "divided by the ratio of rank counts: for weak scaling (fixed batch per rank) Thr(p) / ((p/p0) Thr(p0)), for "
    "strong scaling (fixed global batch) p0 T(p0) / (p T(p)). The baseline is the smallest rank count measured, and is "
    "always named. Repeats that ran side by side are compared in pairs, so that drift of the machine cancels; a run "
    "whose partner failed is left out, and counted next to the interval.",
    "Serial fraction": "For strong scaling, Karp and Flatt's experimentally determined serial fraction (1/S - 1/k) / "
    "(1 - 1/k) with k = p/p0 (Communications of the ACM 33(5), 1990). A fraction that grows with the rank count points "
    "to overhead of the exchange rather than to serial work.",
    "Projections": "To two and four times the largest rank count. With fitted costs of the network (--network) they "
    "are the account of the largest point, with what these costs and the scatter of nodes change from there; without, "
    "T = c0 ideal + c1 x through the points alone, x the logarithm of the nodes or 1 - 1/nodes, chosen by the largest "
    "point when it is held out, up to four times as far. Intervals are the middle 80 % of 1,000 draws of runs, costs, "
    "nodes and of the model's own error, which grows with each doubling and is learnt from held-out points. What was "
    "never measured in kind is refused, with its remedy. Projections are not measurements and never share a line, a "
    "column or a headline with them.",
    "Published figures": "Drawn as a reference line only where the work is the same: preset with the published "
    "configuration, network, batch per rank, precision class, real or made data, weak or strong scaling. The hardware "
    "is another all the same.",
    "Where the time goes": "One account: a part's seconds are its mean share of the step x the geometric mean step, so "
    "parts sum to the step, and what they lose to 1 - efficiency, exactly. The step is that of the ranks on time; what "
    "stragglers take longer is waiting for stragglers. Exposed exchange = on the wire (the least over ranks in each "
    "step, with negotiation and copies; of collectives within passes and update, of which sums over the steps are "
    "measured, as if own computing were even) + waiting. Those collectives, waiting for parameters, recompute and "
    "throttling are taken out of forward, backward and optimizer; host is what lies between phases; imbalance is how "
    "far the slowest rank's mean step exceeds that of all. A rank alone exchanges nothing: what its phase holds is "
    "host. Intervals: delta method. Baseline parts are for the same number of samples per rank.",
    "Messages of the exchange": "Where a run recorded them: the time in which at least one message was under way, "
    "during the backward pass or after it, by the exchange's own clock (rank 0) or Horovod's timeline in a window of "
    "steps; bytes by the algorithm that ran. The least after the backward pass puts the measured times at which "
    "gradients were ready, and a line for the cost of a message (start-up and seconds per byte), into a model in which "
    "messages follow one another and each starts when its last gradient is ready (wait-free back-propagation; Shi, Chu "
    "and Li, INFOCOM 2019); of all ways to merge neighbouring gradients the best is found exactly. The line was timed "
    "before training or given; otherwise it is fitted by relative errors to the messages of the run, which must have "
    "three sizes or more. Efficiency with it: if nothing but that were lost. Where a run did better than the model, "
    "there is no bound.",
    "Settings compared": "In a swept series, settings are compared at equal rank count, preset, precision and data, in "
    "pairs of interleaved repeats, so that drift of the machine cancels. The default is the setting whose swept keys "
    "are at dlbench's defaults (the first swept value for the engine and for keys of the workload or system); where "
    "the sweep lacks it, its first setting. Intervals are per comparison. A setting is faster or slower if its "
    "interval leaves 1 out and Student's paired t test on log ratios stays below 0.05 after Holm's procedure over all "
    "settings and values of keys of all rank counts and sweeps of the report; equal if the interval lies "
    "within 2 % of 1; otherwise undecided. The gain of the best is corrected for the choice: low end simultaneous over "
    "the settings (Bonferroni, pooled scatter), high end that of one, value in the middle; what was measured stands "
    f"next to it. Fewer than {MIN_RUNS} repeats decide nothing.",
    "Which axes matter": "An axis' effect is the ratio of throughput between two of its values, as the geometric mean "
    "over all combinations of the other keys that ran with both, taken in each repeat; repeats are the sample. "
    "Combinations in which a key cannot act take no part. Verdicts as for settings, in the same family. "
    "Break-even of Horovod's autotuner: what its search cost over what a step gains against the baseline.",
    "Training to a quality": "Time to quality runs from the start of training to the end of the first evaluation that "
    "met the target: with evaluations, checkpoints and warm-up steps. The true moment lies up to one evaluation "
    "interval before it. A run that did not meet the target, or whose sanity checks failed, is counted and never left "
    "out; a rank count with such a run gets no speed-up of the time to quality, because the time of that run is not "
    "known.",
    "Faster steps, more samples": "Speed-up of the time to quality = throughput over the baseline's x (samples to "
    "quality of the baseline / those here) x rest. The rest is what evaluation, checkpoints, warm-up steps and waits "
    "add to the measured steps, at the baseline over here. The identity holds in each run; all four are ratios of "
    "geometric means over runs, which keep it exactly (Fleming and Wallace, Communications of the ACM 29(3), 1986).",
    "Gradient noise scale": "McCandlish et al. 2018: tr(Sigma)/|G|^2 from the squared norms of gradients of two batch "
    "sizes, numerator and denominator averaged over steps. Well below it, twice the batch nearly halves the steps; "
    "well above it, it nearly doubles the samples: S = S_min (1 + B_n/B), E = E_min (1 + B/B_n). It is a mean over the "
    "run and grows during training; the law supposes a learning rate tuned to each batch, and directions that curve "
    "alike.",
    "Model FLOPs utilisation": "FLOPs of training on one sample x samples per second / (ranks x peak of a rank). FLOPs "
    "are those the model needs: forward, and twice that backward, products of tensors only, nothing computed again "
    "(Chowdhery et al. 2022, appendix B). The peak is a declared number or a data sheet's, at the precision in force; "
    "it stands next to the figure with its source.",
    "Time to train": "Samples of the recipe over the measured throughput, and the start of the run: an estimate. It "
    "says nothing on whether the training would converge. Hours are those of all GPUs (nodes, cores, ranks) that a run "
    "holds. Two rank counts are distinguished by the ratio of their runs' times, as speed-ups are.",
    "What may be compared": "Runs form one group only if workload, preset, every setting of the plan, goal, engine, "
    "precision, data source, batch, launcher, system, cores per rank and device agree. Under strong scaling the global "
    "batch must agree.",
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
