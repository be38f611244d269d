"""What ranks saw becomes a verdict on each node: of use, doubtful, or to be left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from dlbench.errors import IncompleteDataError
from dlbench.opening import read_bytes, read_end, read_json, why_unreadable
from dlbench.records.comm import read_comm_run
from dlbench.records.folder import MAX_JSON
from dlbench.records.preflight import Finding, PreflightFolder, PreflightNode, SeenRank
from dlbench.specs.comm import CommPlan
from dlbench.specs.hostlist import compressed

_LAST_WORDS = 4096


def judge(plan: CommPlan, folder: PreflightFolder, hosts: Sequence[str]) -> tuple[PreflightNode, ...]:
    """One node after the other, in the order of their ranks.

    `folder`: its folder, when its job has ended. `hosts`: names of the nodes, as far as they are known.
    """
    per_node = plan.layout.ranks_per_node
    seen = {rank: _seen(folder, rank) for rank in range(plan.layout.ranks)}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in seen.values():
        if isinstance(one, SeenRank):
            for name, version in one.versions.items():
                counts[name][version] += 1
    common = {name: versions.most_common(1)[0][0] for name, versions in counts.items()}
    nodes = []
    for number in range(plan.layout.nodes):
        ranks = range(number * per_node, (number + 1) * per_node)
        host = _host(folder, ranks, seen, hosts, number)
        looked = [one for rank in ranks if isinstance(one := seen[rank], SeenRank)]
        problems = [text for rank in ranks if isinstance(text := seen[rank], str)]
        problems += _problems(plan, looked, common)
        nodes.append(
            PreflightNode(
                host=host,
                ranks=tuple(looked),
                problems=tuple(dict.fromkeys(problems)),
                doubts=tuple(dict.fromkeys(_doubts(plan, looked))),
            )
        )
    return tuple(nodes)


def _seen(folder: PreflightFolder, rank: int) -> SeenRank | str:
    try:
        return SeenRank.model_validate(read_json(folder.rank(rank), MAX_JSON))
    except FileNotFoundError:
        code = _text(folder, rank, "failed")
        last = ""
        with suppress(OSError):
            lines = read_end(folder.log(rank), _LAST_WORDS).decode("utf-8", "replace").strip().splitlines()
            last = lines[-1].removeprefix("dlbench: error: ")[:300] if lines else ""
        if code or last:
            return f"the ranks' Python ended with {code or 'an error'}: {last or 'without a word'}"
        if not folder.begun(rank).exists():
            return f"nothing was written to {folder.seen}: it is not there, or the rank was not started"
        return "its rank was ended while it looked"
    except (OSError, ValueError) as error:
        return f"{folder.rank(rank).name}: damaged: {why_unreadable(error)}"


def _text(folder: PreflightFolder, rank: int, which: str) -> str:
    path = folder.failed(rank) if which == "failed" else folder.begun(rank)
    with suppress(OSError, ValueError):
        return read_bytes(path, 1 << 12).decode("utf-8", "replace").strip()
    return ""


def _host(
    folder: PreflightFolder, ranks: range, seen: Mapping[int, SeenRank | str], hosts: Sequence[str], number: int
) -> str:
    for rank in ranks:
        one = seen[rank]
        if isinstance(one, SeenRank):
            return one.host
        if said := _text(folder, rank, "begun"):
            return said
    return hosts[number] if number < len(hosts) else f"node {number + 1}"


def _problems(plan: CommPlan, seen: Sequence[SeenRank], common: Mapping[str, str]) -> Iterator[str]:
    for one in seen:
        yield from one.problems
        yield from (f"{name} does not import: {why}" for name, why in one.broken.items() if name in ("torch", "numpy"))
        mine = one.versions.get("dlbench", "")
        if mine != plan.dlbench_version:
            yield f"dlbench {mine} there, {plan.dlbench_version} here: install the same ({one.python})"
        for name, version in common.items():
            other = one.versions.get(name)
            if name != "dlbench" and other != version:
                yield f"{name} {other or 'is not there'}, other nodes have {version}"
        yield from (place.problem for place in one.scratch if place.problem)
    wanted = plan.system.node.gpus
    used = Counter(one.gpu for one in seen if one.gpu is not None)
    yield from (f"{count} ranks share GPU {uuid}" for uuid, count in used.items() if count > 1)
    shown = {uuid for one in seen for uuid in one.node_gpus}
    count = max(len(shown), len(used))
    # A rank may be shown its own GPU alone, or those that were asked for: as many as ranks.
    needed = min(wanted, len(seen)) if plan.system.slurm.gpu_count == "ranks" else wanted
    if seen and wanted and count < needed:
        yield f"{count} of {needed} GPUs"


def _doubts(plan: CommPlan, seen: Sequence[SeenRank]) -> Iterator[str]:
    cores: Counter[int] = Counter(core for one in seen for core in one.cores)
    needed = plan.layout.cores_per_rank
    shared = sum(count > 1 for count in cores.values())
    if plan.system.launch.pin and shared:
        yield f"ranks share {shared} core{'s' * (shared > 1)}"
    elif any(len(one.cores) < needed for one in seen):
        least = min(len(one.cores) for one in seen)
        yield f"{least} core{'s' * (least > 1)} of the {needed} that each rank should have"
    if far := [str(one.local_rank) for one in seen if one.beside_gpu is False]:
        yield f"cores of local rank{'s' * (len(far) > 1)} {', '.join(far)} are not next to the GPU: see slurm.cpu_bind"
    for one in seen:
        yield from (
            f"{name} does not import: {why}" for name, why in one.broken.items() if name not in ("torch", "numpy")
        )
        if one.compiler:
            yield f"train.compile and fused LAMB and LARS fail there: {one.compiler}"


def exchange_finding(plan: CommPlan, folder: PreflightFolder) -> tuple[Finding, dict[str, str]]:
    """What became of the all-reduce; and what it says against single hosts."""
    subject = "all-reduce"
    if plan.layout.ranks == 1:
        return Finding(subject=subject, state="unknown", found="one rank has nobody to exchange with"), {}
    try:
        run = read_comm_run(folder.path)
    except IncompleteDataError as error:
        return Finding(subject=subject, state="wrong", found=str(error)), {}
    if run.record is None:
        blamed = {status.host: status.reason for status in run.statuses if status.failure == "own" and status.reason}
        all_alike = len(blamed) == run.plan.layout.nodes
        return Finding(subject=subject, state="wrong", found=run.detail), {} if all_alike else blamed
    points = [point for point in run.record.points if point.times_s]
    carriers = ", ".join(dict.fromkeys(point.carrier for point in points))
    missing = f"; not measured here: {'; '.join(run.record.not_measured)}" if run.record.not_measured else ""
    if run.record.state != "valid":
        return Finding(subject=subject, state="wrong", found=run.detail), {}
    found = f"right sums over {plan.layout.ranks} ranks by {carriers}{missing}"
    return Finding(subject=subject, state="ok", found=found), {}


def excluded(nodes: Sequence[PreflightNode]) -> str:
    """Nodes to leave out, in Slurm's short form; none where no node passed, for then it is not the nodes."""
    failed = [node.host for node in nodes if node.problems]
    return compressed(failed) if len(failed) < len(nodes) else ""
