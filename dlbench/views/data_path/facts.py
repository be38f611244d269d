"""What runs say of their input beyond times, in words: readers, order, coverage, equal work, staging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlbench.errors import IncompleteDataError
from dlbench.reading.samples.node_samples import node_stages, nodes_of
from dlbench.reading.samples.readings import MAX_NODES_OF_LARGE_RUN
from dlbench.reading.scaling import Group
from dlbench.records.scan import Run
from dlbench.report.wording import number_text, percent, runs_text


def facts(group: Group, middle: Sequence[Run], temperature: str) -> Iterator[tuple[str, str]]:
    """Titles and texts, in order.

    Args:
        group: comparable runs.
        middle: the run in the middle of each point, by rank count.
        temperature: whether what was read was cold or warm, in words.
    """
    last = middle[-1]
    yield "Readers", _readers(last)
    yield "Cold or warm", temperature
    yield "Order", _order(last)
    yield "Coverage", _coverage(last)
    yield "Equal work", _equal_work(group)
    unreadable = _unreadable(group)
    if unreadable:
        yield "Unreadable samples", unreadable
    yield "Staging", _staging(middle)


def _readers(run: Run) -> str:
    data = run.plan.workload.data
    if data.is_synthetic:
        return "none: batches are made once and used again" + ", on the device" * (data.synthetic_on == "device")
    found = None if run.record is None else run.record.reading
    workers = data.loader_workers if found is None else found.loader_workers
    asked = f"data.loader_workers {data.loader_workers}"
    recorded = dict(run.record.data) if run.record is not None else {}
    decoder = f"; decoder {recorded['decoder']}" if "decoder" in recorded else ""
    if not workers:
        return f"the training process itself reads ({asked}){decoder}"
    ahead = "" if found is None else f", each {found.prefetch_batches} batches ahead"
    return f"{workers} reader processes per rank{ahead} ({asked}){decoder}"


def _order(run: Run) -> str:
    data, seed = run.plan.workload.data, run.plan.workload.train.seed
    if data.is_synthetic:
        return "a pool of batches in turn; no shuffling"
    if data.shuffle == "global":
        how = f"global shuffling: one permutation of the whole data set per epoch, seed {seed}"
    else:
        first = "drawn from the whole data set" if data.partition == "shuffled" else "its part in the order of storage"
        how = f"{data.shuffle} shuffling: each rank permutes the samples that it holds ({first}), seed {seed}"
        if data.shuffle != "local":
            how += f", of which {percent(data.exchanged_share)} are exchanged per epoch"
    audit = None if run.record is None else run.record.shuffle
    if audit is None:
        return f"{how}; not audited"
    wrong = sum(one.twice + one.never for one in audit.epochs)
    return f"{how}; audit: " + (f"{wrong:,} samples read twice or never" if wrong else "no sample twice, none missed")


def _coverage(run: Run) -> str:
    assert run.record is not None
    data = run.record.data
    seen = run.record.steps * run.plan.global_batch
    size = data.get("num_samples")
    if run.plan.workload.data.is_synthetic:
        pool = f" of {size:,} samples" if isinstance(size, int) else ""
        return f"a pool{pool} per rank, used again and again"
    if not isinstance(size, int) or size <= 0:
        return "unknown: the record names no size of the data set"
    text = f"{seen:,} samples of a set of {size:,} ({number_text(seen / size, 'epochs')} epochs), warm-up included"
    dropped = data.get("dropped_per_epoch")
    if isinstance(dropped, int) and dropped:
        text += f"; {dropped:,} per epoch left out because they fill no batch"
    return text


def _equal_work(group: Group) -> str:
    details = dict.fromkeys(
        check.detail
        for run in group.runs
        if run.record is not None
        for check in run.record.checks
        if check.name == "equal work"
    )
    if not details:
        return "not checked"
    return "; ".join(details)


def _unreadable(group: Group) -> str:
    counts = [sum(rank.bad_sample_count for rank in run.record.ranks) for run in group.runs if run.record is not None]
    bad = sum(count > 0 for count in counts)
    if not bad:
        return ""
    return f"up to {max(counts):,} in a run, left out (data.on_bad_sample skip); {bad} of {len(counts)} runs had some"


def _staging(middle: Sequence[Run]) -> str:
    """Of the run in the middle of each point: its record, else spans, which unsampled nodes hold, too."""
    data = middle[0].plan.workload.data
    if data.is_synthetic:
        return "no file is read"
    told = [run.record.staging.seconds for run in middle if run.record is not None and run.record.staging is not None]
    if told:
        if data.staging == "lazy":
            return f"samples were kept on the node ({data.staging_tier}) when they were first read"
        return f"{data.staging} to {data.staging_tier}: up to {number_text(max(told), 's')} until all nodes were ready"
    if data.staging != "none":
        return f"{data.staging} to {data.staging_tier} was asked for; the runs do not say what it took"
    found = [seconds for run in middle if (seconds := _staged_s(run)) is not None]
    if not found:
        return "none asked for (data.staging none): ranks read the data source where it lies"
    whose = f"by the spans of {runs_text(len(found))}, the middle one of each rank count"
    if not max(found):
        return f"not done by these runs: ranks read the data source where it lies ({whose})"
    return f"up to {number_text(max(found), 's')} on a node ({whose})"


def _staged_s(run: Run) -> float | None:
    """Seconds of staging on the node with most of it; None where no node that is looked at has spans."""
    found = []
    for node in spread(nodes_of(run), MAX_NODES_OF_LARGE_RUN):
        try:
            stages = node_stages(run, node)
        except IncompleteDataError:
            # Damage is reported by the views of telemetry and steps.
            continue
        if stages.has_spans:
            found.append(sum(end - begin for stage, begin, end in stages.pieces if stage == "staging") / 1e9)
    return max(found, default=None)


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` items, evenly spread, the first among them."""
    return list(items[:: -(-len(items) // most)]) if len(items) > most else list(items)
