"""How the numbers are made, and what the report does not show: the words of the method view."""

from __future__ import annotations

from dlbench.analysis.statistics import MIN_RUNS, RESAMPLES
from dlbench.publish.model import Group

METHODS: tuple[tuple[str, str], ...] = (
    (
        "Which runs count",
        "Only runs whose sanity checks held (finite loss, equal parameters on all ranks, equal work) and whose step "
        "files are whole. All others are listed with the reason and yield no figure. Warm-up steps are recorded and "
        "left out.",
    ),
    (
        "Throughput",
        "Samples of all measured steps of all ranks, divided by the longest measured time of any rank.",
    ),
    (
        "Step time",
        "In each step the slowest rank counts. A run's step time is the median over its measured steps; p95 is their "
        "95th percentile.",
    ),
    (
        "Medians and intervals",
        f"The run is the experimental unit, not the step. Figures are medians over runs. With {MIN_RUNS} runs or more, "
        f"the interval is a 95 % percentile bootstrap of the median ({RESAMPLES:,} resamples, fixed seed); with five "
        "or six runs that is close to the range of the runs. With fewer runs the range is printed and the comparison "
        "is called insufficient; a single run has no interval.",
    ),
    (
        "Speed-up and efficiency",
        "Speed-up is throughput divided by the baseline's throughput. Efficiency is speed-up divided by the ratio of "
        "rank counts: for weak scaling (fixed batch a rank) Thr(p) / ((p/p0) Thr(p0)), for strong scaling (fixed "
        "global batch) p0 T(p0) / (p T(p)). The baseline is the smallest rank count measured, and is always named. "
        "Interleaved repeats are resampled in pairs, so that drift of the machine cancels.",
    ),
    (
        "Serial fraction",
        "For strong scaling, Karp and Flatt's experimentally determined serial fraction (1/S - 1/k) / (1 - 1/k) with "
        "k = p/p0 (Communications of the ACM 33(5), 1990). A fraction that grows with the rank count points to "
        "overhead of the exchange rather than to serial work.",
    ),
    (
        "Parts of a step",
        "Parts are means over steps, ranks and runs, because only means sum to the whole: they add up to the mean "
        "step of the slowest rank exactly. They can therefore differ a little from the medians in the other tables. "
        "'Other' is what no phase holds (loss read-back, loop). 'Imbalance of ranks' is how much longer the slowest "
        "rank took than the mean rank over the whole measurement.",
    ),
    (
        "Exposed gradient exchange",
        "The time after the backward pass until all gradients are averaged. Exchange that overlaps the backward pass "
        "is part of 'backward'. Waiting for slower ranks is part of it too; the table says how much, taken as the "
        "excess over the rank that waited least in each step. At one rank there is nothing to exchange; what stands "
        "there is the engine's own work.",
    ),
    (
        "Lost points",
        "Each part is compared with the same part of the baseline, for the same number of samples a rank. Differences "
        "divided by the mean step sum to 1 - efficiency (of means). This is a first-order account: a part is "
        "charged with the time it holds, whatever the cause.",
    ),
    (
        "What may be compared",
        "Runs form one group only if workload, preset, every setting of the plan, engine, precision, data source, "
        "batch, launcher, system, cores a rank and device agree. Under strong scaling the global batch must agree.",
    ),
)


def not_shown(groups: tuple[Group, ...]) -> tuple[tuple[str, str], ...]:
    """What a reader may look for and not find, and what would produce it."""
    found = [
        ("Energy and GPU telemetry", "not measured: these runs hold no NVML trace."),
        (
            "Collective bandwidth",
            "not measured: it needs a micro-benchmark of the all-reduce beside the training runs.",
        ),
        (
            "Step times rank by rank",
            "measured but not drawn here: every step of every rank is in the rank-*.steps files of each run.",
        ),
        ("Time to quality", "not measured: these runs are too short to converge; they measure speed only."),
    ]
    if groups and all(len(group.points) == 1 for group in groups):
        found.insert(0, ("Scaling", "needs the same workload at two or more rank counts, e.g. --ranks 1,2,4."))
    return tuple(found)
