"""Judges each node of a pre-flight from the reports of its ranks: usable, doubtful, or to be excluded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dlbench.errors import IncompleteDataError
from dlbench.opening import read_bytes, read_end, read_json, why_unreadable
from dlbench.records.comm import read_comm_run
from dlbench.records.folder import MAX_JSON
from dlbench.records.preflight import Finding, PreflightFolder, PreflightNode, SeenRank
from dlbench.specs.comm import CommPlan
from dlbench.specs.launch import compressed
from dlbench.units import counted, plural

_LOG_END_BYTES = 4096
_REQUIRED = ("torch", "numpy")  # Packages without which no run can start.


def judge(plan: CommPlan, folder: PreflightFolder, hosts: Sequence[str]) -> tuple[PreflightNode, ...]:
    """Returns the nodes in the order of their ranks; `hosts`: their names, as far as they are known."""
    per_node = plan.layout.ranks_per_node
    reports = [_report(folder, rank) for rank in range(plan.layout.ranks)]
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # Ranks by package and version.
    for report in reports:
        if isinstance(report, SeenRank):
            for package, version in report.versions.items():
                counts[package][version] += 1
    common_versions = {package: versions.most_common(1)[0][0] for package, versions in counts.items()}
    nodes = []
    for number in range(plan.layout.nodes):
        ranks = range(number * per_node, (number + 1) * per_node)
        node_reports = [reports[rank] for rank in ranks]
        seen_ranks = [report for report in node_reports if isinstance(report, SeenRank)]
        problems = [report for report in node_reports if isinstance(report, str)]
        problems += _problems(plan, seen_ranks, common_versions)
        nodes.append(
            PreflightNode(
                host=_host(folder, ranks, reports) or next(iter(hosts[number:]), f"node {number + 1}"),
                ranks=tuple(seen_ranks),
                problems=tuple(dict.fromkeys(problems)),
                doubts=tuple(dict.fromkeys(_doubts(plan, seen_ranks))),
            )
        )
    return tuple(nodes)


def _report(folder: PreflightFolder, rank: int) -> SeenRank | str:
    try:
        return SeenRank.model_validate(read_json(folder.rank(rank), MAX_JSON))
    except FileNotFoundError:
        code = _text(folder.failed(rank))
        message = ""
        with suppress(OSError):
            log_end = read_end(folder.log(rank), _LOG_END_BYTES).decode("utf-8", "replace").strip()
            message = next(reversed(log_end.splitlines()), "").removeprefix("dlbench: error: ")[:300]
        if code or message:
            return f"the ranks' Python ended with {code or 'an error'}: {message or 'no message'}"
        if not folder.begun(rank).exists():
            return f"nothing was written to {folder.seen}: the folder does not exist there, or the rank did not start"
        return "its rank was ended during the check"
    except (OSError, ValueError) as error:
        return f"{folder.rank(rank).name}: damaged: {why_unreadable(error)}"


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return read_bytes(path, 1 << 12).decode("utf-8", "replace").strip()
    return ""


def _host(folder: PreflightFolder, ranks: range, reports: Sequence[SeenRank | str]) -> str:
    for rank in ranks:
        report = reports[rank]
        if isinstance(report, SeenRank):
            return report.host
        if host := _text(folder.begun(rank)):
            return host
    return ""


def _problems(plan: CommPlan, ranks: Sequence[SeenRank], common_versions: Mapping[str, str]) -> Iterator[str]:
    for rank in ranks:
        yield from rank.problems
        for package, error in rank.broken.items():
            if package in _REQUIRED:
                yield f"{package} does not import: {error}"
        dlbench_version = rank.versions.get("dlbench", "")
        if dlbench_version != plan.dlbench_version:
            yield f"dlbench {dlbench_version} there, {plan.dlbench_version} here: install the same ({rank.python})"
        for package, common_version in common_versions.items():
            version = rank.versions.get(package)
            if package != "dlbench" and version != common_version:
                yield f"{package} {version or 'is not installed'}, other nodes have {common_version}"
        yield from (tier.problem for tier in rank.scratch if tier.problem)
    ranks_by_gpu = Counter(rank.gpu for rank in ranks if rank.gpu is not None)
    yield from (f"{count} ranks share GPU {uuid}" for uuid, count in ranks_by_gpu.items() if count > 1)
    visible_gpus = {uuid for rank in ranks for uuid in rank.node_gpus}
    num_gpus = max(len(visible_gpus), len(ranks_by_gpu))
    num_needed = plan.system.node.gpus
    if plan.system.slurm.gpu_count == "ranks":  # the job requests only one GPU per rank
        num_needed = min(num_needed, len(ranks))
    if ranks and num_gpus < num_needed:
        yield f"{num_gpus} of {num_needed} GPUs"


def _doubts(plan: CommPlan, ranks: Sequence[SeenRank]) -> Iterator[str]:
    ranks_by_core: Counter[int] = Counter(core for rank in ranks for core in rank.cores)
    num_needed = plan.layout.cores_per_rank
    num_shared = sum(count > 1 for count in ranks_by_core.values())
    least_cores = min((len(rank.cores) for rank in ranks), default=num_needed)
    if plan.system.launch.pin and num_shared:
        yield f"ranks share {counted(num_shared, 'core')}"
    elif least_cores < num_needed:
        yield f"{counted(least_cores, 'core')} of the {num_needed} that each rank should have"
    if remote := [str(rank.local_rank) for rank in ranks if rank.near_gpu is False]:
        local_ranks = f"{plural('local rank', len(remote))} {', '.join(remote)}"
        yield f"cores of {local_ranks} are not on the NUMA node of the GPU: see slurm.cpu_bind"
    for rank in ranks:
        for package, error in rank.broken.items():
            if package not in _REQUIRED:
                yield f"{package} does not import: {error}"
        if rank.compiler:
            yield f"train.compile and fused LAMB and LARS fail there: {rank.compiler}"


def exchange_finding(plan: CommPlan, folder: PreflightFolder) -> tuple[Finding, dict[str, str]]:
    """Returns the result of the all-reduce, and the problems of single hosts in it."""
    subject = "all-reduce"
    if plan.layout.ranks == 1:
        return Finding(subject=subject, state="unknown", found="not possible with one rank"), {}
    try:
        run = read_comm_run(folder.path)
    except IncompleteDataError as error:
        return Finding(subject=subject, state="wrong", found=str(error)), {}
    if run.record is None:
        reasons = {status.host: status.reason for status in run.statuses if status.failure == "own" and status.reason}
        if len(reasons) == run.plan.layout.nodes:  # all nodes fail, so that no single one is to blame
            reasons = {}
        return Finding(subject=subject, state="wrong", found=run.detail), reasons
    if run.record.state != "valid":
        return Finding(subject=subject, state="wrong", found=run.detail), {}
    carriers = ", ".join(dict.fromkeys(point.carrier for point in run.record.points if point.times_s))
    text = f"correct sums over {plan.layout.ranks} ranks by {carriers}"
    if run.record.not_measured:
        text += f"; not measured here: {'; '.join(run.record.not_measured)}"
    return Finding(subject=subject, state="ok", found=text), {}


def excluded(nodes: Sequence[PreflightNode]) -> str:
    """Returns the nodes to exclude as a host list; empty if all failed, because then the nodes are not the cause."""
    failed = [node.host for node in nodes if node.problems]
    return compressed(failed) if len(failed) < len(nodes) else ""
