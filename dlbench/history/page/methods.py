"""How the numbers of trends are made: the words of the method view."""

from __future__ import annotations

from dlbench.history.trends.change_points import LEVEL, MIN_EFFECT, MIN_NIGHTS, ODD_NIGHTS
from dlbench.history.trends.rank_sums import MIN_SEGMENT
from dlbench.history.trends.slow_months import RECENT_DAYS
from dlbench.reading.slow_nodes import SLOW
from dlbench.stats.estimates import MIN_RUNS, RESAMPLES

METHODS: tuple[tuple[str, str], ...] = (
    (
        "What is one series",
        "Runs of one configuration on one machine and device, with equal ranks and nodes. Anything else that decides "
        "what is computed or how it is measured makes another series; a new machine begins a new one.",
    ),
    (
        "Runs and nights",
        "All runs that were planned together are one night, whose value is the median over its runs. Nights are what "
        "is tested and resampled: runs of one night share its state of the machine, and counting them one by one "
        "would call differences real that are not.",
    ),
    (
        "Change points",
        "Candidates are kernel change points (ruptures; the family of E-divisive), far too many; those that do not "
        "hold are merged away from the bottom, the weakest first, as Hunter does. A candidate is tested by its rank "
        "sum against the largest one of any place between its neighbours in permutations, so p pays for the search. "
        "Nights "
        f"that resemble their neighbours count less. A change point has p at most {LEVEL}, medians at least "
        f"{MIN_EFFECT:.0%} apart, and at least {MIN_SEGMENT} nights on either side: up to {ODD_NIGHTS} odd nights "
        f"are outliers. Fewer than {MIN_NIGHTS} nights show nothing.",
    ),
    (
        "Ratios and intervals",
        "The ratio is the median of the nights after over that before, up to the neighbouring change points. Its "
        f"interval is a 95 % percentile bootstrap over nights ({RESAMPLES:,} resamples, fixed seed). The place was "
        "found in the same nights, so a small change looks slightly larger than it is.",
    ),
    (
        "What differs at a change",
        "Where a change lies has a 95 % bootstrap interval, too. Commits are those of the nights just outside it (tag "
        "commit, else the commit of dlbench's own checkout). A key of the environment or a tag is named where all runs "
        "of the level after have other values than all runs of the level before, nights inside the interval left "
        "out, and keys that are new nearly every night, such as job numbers. What differs is a place to "
        "look, not a proven cause.",
    ),
    (
        "The newest nights",
        "Nights beyond the median -+ 3 scaled median absolute deviations of their level are named at once; whether "
        "the level has changed is said when there are enough of them.",
    ),
    (
        "Slow nodes",
        "In a run on several hosts, a host's ratio is the own work of its slowest rank (its step without the exchange) "
        "over the median of the other hosts' slowest ranks, so runs of any kind stand side by side. Figures are "
        "medians over the runs of a calendar month (UTC). A host is slow where the whole interval of "
        f"{MIN_RUNS} or more runs lies above {SLOW:g}, suspected where fewer runs have a median above it. Whether it "
        f"is slow now is asked of its runs since its last change point, none older than {RECENT_DAYS} days before "
        "the newest run. Runs on one host and runs with a planted fault say nothing.",
    ),
)
