"""Slow nodes and slow links: how often healthy hosts are accused, and how often those that are slow are found.

A month has 30 nights on 64 hosts. Every night each host is in one job of eight hosts, drawn anew, which repeats its run
three times. A host's own work is its own share, times what slows it for one job (a neighbour, heat), times what
differs from run to run, all lognormal. That is what `--exclude` must not mistake for a slow host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

import numpy as np

from benchmarks.figures import Figure
from benchmarks.gate import share_figure
from dlbench.analysis.slow_nodes import HostSessions, verdicts_of
from dlbench.analysis.stragglers import largest_by_host, medians_of_others
from dlbench.history.entry import HistoryEntry, HostEntry
from dlbench.history.slow_months import SlowMonths, slow_months
from dlbench.history.trends import dated

HOSTS = 64
NIGHTS = 30
JOB_HOSTS = 8
REPEATS = 3
RUN_SD = 0.01
START = datetime(2026, 3, 1, 2, tzinfo=UTC)

MONTHS = 120
SLOW_MONTHS = 40
FOLDERS = 2000


def figures() -> Iterator[Figure]:
    """All figures of the subject."""
    for job_sd in (0.02, 0.03):
        yield healthy_months(job_sd)
    for more in (0.06, 0.08):
        yield found_hosts(more)
    yield found_links()
    yield folders(sessions=1)
    yield folders(sessions=5)
    yield unlike_hosts()


def healthy_months(job_sd: float, months: int = MONTHS) -> Figure:
    """Months in which any host stands in `--exclude` although none is slow."""
    accused = sum(bool(month(number, {}, job_sd).exclude) for number in range(months))
    return share_figure(
        f"slow nodes: healthy months of {HOSTS} hosts (host in job {job_sd:.0%}, run {RUN_SD:.0%}) that exclude a host",
        accused,
        months,
        "at most 2 %" if job_sd == 0.02 else "at most 5 %",
        lambda value: value <= (2 if job_sd == 0.02 else 5),
    )


def found_hosts(more: float, months: int = SLOW_MONTHS) -> Figure:
    """Months in which a host that takes so much longer all month is excluded, and what else is."""
    found = [month(1000 + number, {"n07": 1 + more}, 0.02).exclude for number in range(months)]
    others = sum(len(set(one) - {"n07"}) for one in found)
    return share_figure(
        f"slow nodes: months in which a host that is {more:.0%} slow is found",
        sum("n07" in one for one in found),
        months,
        "at least 80 %",
        lambda value: value >= 80,
        f"others excluded: {others}",
    )


def found_links(months: int = SLOW_MONTHS) -> Figure:
    """Months in which a host whose exchanges end 4 % of a step late is excluded for its link, and for nothing else."""
    found = [month(2000 + number, {}, 0.02, slow_link="n07").hosts for number in range(months)]
    told = sum({one.host: one.verdict for one in hosts}["n07"] == "slow link" for hosts in found)
    others = sum(one.verdict not in ("not shown to be slow", "slow link") for hosts in found for one in hosts)
    return share_figure(
        "slow nodes: months in which a link that delays by 4 % of a step is found, and told apart from a slow host",
        told,
        months,
        "at least 80 %",
        lambda value: value >= 80,
        f"other verdicts: {others}",
    )


def folders(sessions: int, trials: int = FOLDERS) -> Figure:
    """Folders of ten runs on all hosts in so many jobs: those with a host to exclude although none is slow."""
    generator = np.random.default_rng([4, sessions])
    accused = 0
    for _ in range(trials):
        own = np.exp(generator.normal(0, 0.02, (sessions, HOSTS)) + generator.normal(0, RUN_SD, (sessions, HOSTS)))
        ratios = own / np.median(own, axis=1, keepdims=True)
        verdicts = verdicts_of({f"n{host}": HostSessions(work=ratios[:, host].tolist()) for host in range(HOSTS)})
        accused += "slow" in verdicts.values()
    return share_figure(
        f"slow nodes: folders of {sessions} jobs on {HOSTS} healthy hosts that exclude one",
        accused,
        trials,
        "0 %" if sessions == 1 else "at most 2 %",
        lambda value: value <= (0 if sessions == 1 else 2),
    )


def unlike_hosts(trials: int = 4000) -> Figure:
    """How much slower a host of eight equal ranks looks beside hosts of four, ranks scattering by 2 %."""
    generator = np.random.default_rng(5)
    hosts = ["a"] * 8 + ["b"] * 4 + ["c"] * 4
    ratios = []
    for _ in range(trials):
        slowest = largest_by_host(hosts, generator.normal(1, 0.02, len(hosts)).tolist())
        ratios.append(slowest["a"] / medians_of_others(slowest)["a"] - 1)
    mean, half = 100 * float(np.mean(ratios)), 196 * float(np.std(ratios)) / trials**0.5
    return Figure(
        name="slow nodes: a host of 8 equal ranks beside hosts of 4 looks slower by",
        value=mean,
        low=mean - half,
        high=mean + half,
        n=trials,
        unit="%",
        goal="within 0.1 %",
        met=abs(mean) <= 0.1,
    )


def month(seed: int, slow: Mapping[str, float], job_sd: float, slow_link: str = "") -> SlowMonths:
    """What a month says of its hosts."""
    generator = np.random.default_rng([3, seed])
    names = [f"n{number:02d}" for number in range(HOSTS)]
    entries = []
    for night in range(NIGHTS):
        order = generator.permutation(HOSTS)
        for job in range(HOSTS // JOB_HOSTS):
            hosts = sorted(names[number] for number in order[job * JOB_HOSTS : (job + 1) * JOB_HOSTS])
            in_job = generator.normal(0, job_sd, JOB_HOSTS)
            for repeat in range(REPEATS):
                own = np.exp(in_job + generator.normal(0, RUN_SD, JOB_HOSTS))
                work = {host: float(one) * slow.get(host, 1.0) for host, one in zip(hosts, own, strict=True)}
                others = medians_of_others(work)
                late = {host: 0.04 * (host == slow_link) + float(generator.normal(0, 0.005)) for host in hosts}
                later = {host: value - medians_of_others(late)[host] for host, value in late.items()}
                told = tuple(
                    HostEntry(
                        host=host,
                        num_ranks=4,
                        work_ratio=work[host] / others[host],
                        later=later[host] if slow_link else None,
                        later_at_least=later[host] - 0.002 if slow_link else None,
                    )
                    for host in hosts
                )
                entries.append(_entry(night, job, repeat, told))
    return slow_months(dated(entries))


def _entry(night: int, job: int, repeat: int, hosts: tuple[HostEntry, ...]) -> HistoryEntry:
    moment = START + timedelta(days=night, minutes=10 * job)
    return HistoryEntry(
        run_id=f"{night}-{job}-{repeat}",
        folder="",
        state="valid",
        why="",
        created=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        finished=(moment + timedelta(minutes=repeat)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        series=f"s{night}-{job}",
        repeat=repeat,
        side="",
        variant="plain",
        group="g",
        label="simulated",
        system="box",
        workload="resnet50",
        preset="ci",
        engine="ddp",
        ranks=4 * len(hosts),
        nodes=len(hosts),
        slurm_job_id=f"{night}{job:02d}",
        commit="",
        tags={},
        environment={},
        figures={},
        hosts=hosts,
        content_digest="",
    )
