"""How the numbers of the collective benchmark are made: the words of the method view."""

from __future__ import annotations

from dlbench.collectives.results.choice import RATE_SHARE, STAY_WITHIN
from dlbench.stats.estimates import MIN_RUNS, RESAMPLES

METHODS: tuple[tuple[str, str], ...] = (
    (
        "Which points count",
        "Only points whose result was right on every rank, of runs whose record is valid. A run with a wrong result "
        "anywhere yields no figure. All others are listed with the reason. Warm-up iterations are not recorded.",
    ),
    (
        "Time",
        "In each iteration the slowest rank counts, from a common start. A run's time is the median over its timed "
        "iterations.",
    ),
    (
        "Medians and intervals",
        f"The run is the experimental unit, not the iteration. Figures are medians over runs. With {MIN_RUNS} runs or "
        f"more, the interval is a 95 % percentile bootstrap of the median ({RESAMPLES:,} resamples, fixed seed). With "
        "fewer runs the range is printed. For a single run it is the middle half of its iterations, labelled "
        "within-run, which says nothing on how runs differ.",
    ),
    (
        "algbw and busbw",
        "As nccl-tests defines them: algbw = bytes / time; busbw = algbw x 2 (p - 1) / p for all-reduce, (p - 1) / p "
        "for reduce-scatter, all-gather and all-to-all, and 1 for broadcast, with p ranks. Bytes are those of each "
        "rank's whole buffer: for all-gather the gathered result, for reduce-scatter the input. GB/s is 1e9 bytes a "
        "second.",
    ),
    (
        "Counters",
        "Steps, messages and bytes are counted by the transport while an algorithm runs, and must equal the formulas "
        "exactly; a difference is a doubt. Bytes are the largest of any rank. Libraries do not tell theirs.",
    ),
    (
        "Fitted costs",
        "A message costs alpha + bytes x beta, by level (inside a group, across groups) and message size; a byte "
        "reduced costs gamma. One fit for each system, carrier and type of element, over all collectives, layouts, "
        "algorithms and sizes, with relative errors and robust against outliers. Where groups hold several ranks, "
        "whether these share one link to other groups or have a link each, and whether their bytes inside the group "
        "add up (shared memory or processors), is what predicts held-out points better.",
    ),
    (
        "Predictions",
        "What stands beside a measurement is predicted by a fit that did not see the point; how it was held out is "
        "said with the fit. Libraries choose their algorithms themselves and are not predicted.",
    ),
    (
        "Recommended",
        "By size the fastest series; where the one of the next smaller size is at most "
        f"{STAY_WITHIN:.0%} slower, that one stays.",
    ),
    (
        "Where the lead changes",
        "Measured: between two neighbouring sizes with different recommended series, where lines through their times "
        "meet on logarithmic axes. It is beyond scatter if at the larger size the interval of the ratio keeps away "
        "from 1. Model: the size from which another algorithm is predicted to be faster.",
    ),
    (
        "Fusion size",
        f"The smallest message that reaches {RATE_SHARE:.0%} of the asymptotic rate of the series recommended at the "
        "largest size: 9 x start-up / time per byte, of a line through its sizes fitted with relative errors. Smaller "
        "messages waste start-ups; larger ones leave less to overlap with the backward pass.",
    ),
    (
        "Against libraries",
        "Time of the library over time of dlbench's algorithm, from runs that hold both, resampled in pairs. Above 1, "
        "the algorithm is faster.",
    ),
)
