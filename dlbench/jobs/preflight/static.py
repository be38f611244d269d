"""A system file against what Slurm says of itself, before anything is submitted."""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dlbench.errors import nearest
from dlbench.jobs.preflight.asking import (
    SlurmNode,
    UnansweredError,
    ask,
    associations,
    mpi_plugins,
    nodes_of,
    partitions,
)
from dlbench.jobs.scripts.job import limit_seconds, time_text
from dlbench.records.answers.preflight import Finding, FindingState
from dlbench.specs.plan import LaunchPlan

_ENDLESS = ("UNLIMITED", "INFINITE", "NONE")


def static_findings(plan: LaunchPlan) -> list[Finding]:
    """All findings, in the order of a system file; none of them starts anything.

    Args:
        plan: of the pre-flight: its system, nodes and ranks.
    """
    try:
        version = ask("sinfo", "--version").strip()
        known = partitions(plan.system.slurm.clusters)
    except UnansweredError as error:
        return [_finding("Slurm", "unknown", str(error), "ask from a login node of the cluster")]
    found = [_finding("Slurm", "ok", f"{version}; {len(known)} partition{'s' * (len(known) != 1)}")]
    names, problem = _partitions_of(plan, known)
    if problem is not None:
        return [*found, problem, *_beside_nodes(plan, None)]
    chosen = [known[name] for name in names]
    found += _of_partitions(plan, names, chosen)
    try:
        nodes = nodes_of(",".join(names), plan.system.slurm.clusters)
    except UnansweredError as error:
        return [*found, _finding("nodes", "unknown", str(error)), *_beside_nodes(plan, chosen[0])]
    return [*found, *_of_nodes(plan, nodes, chosen[0]), *_beside_nodes(plan, chosen[0])]


def _finding(subject: str, state: FindingState, found: str, remedy: str = "") -> Finding:
    return Finding(subject=subject, state=state, found=found, remedy=remedy)


# Partitions


def _partitions_of(plan: LaunchPlan, known: Mapping[str, Mapping[str, str]]) -> tuple[list[str], Finding | None]:
    asked = plan.system.slurm.partition
    if asked is None:
        default = [name for name, said in known.items() if said.get("Default") == "YES"]
        if default:
            return default, None
        return [], _finding("partition", "wrong", "none is given, and Slurm has no default", "set slurm.partition")
    names = asked.split(",")
    missing = [name for name in names if name not in known]
    if missing:
        told = f"slurm.partition: {nearest(missing[0], known)}"
        return [], _finding("partition", "wrong", f"there is none of the name {missing[0]}", told)
    return names, None


def _of_partitions(plan: LaunchPlan, names: Sequence[str], chosen: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    slurm = plan.system.slurm
    default = "" if slurm.partition else " (the default)"
    for name, said in zip(names, chosen, strict=True):
        state = said.get("State", "")
        if state != "UP":
            yield _finding("partition", "wrong", f"{name} is {state or 'in no known state'}", "use one that is UP")
        else:
            yield _finding("partition", "ok", f"{name}{default} is up, {said.get('TotalNodes', '?')} nodes")
        yield _time(slurm.time_limit, said.get("MaxTime", ""))
        yield from _longest_job(slurm.max_time, said.get("MaxTime", ""))
        yield from _max_nodes(plan.layout.nodes, said.get("MaxNodes", ""))
        yield from _sharing(exclusive=slurm.exclusive, said=said.get("OverSubscribe", ""))


def _time(limit: str, most: str) -> Finding:
    asked, allowed = limit_seconds(limit), _seconds(most)
    if not asked:
        return _finding("time limit", "ok", f"none is asked for; the partition allows {most or '?'}")
    if allowed is None:
        return _finding("time limit", "ok", f"{limit}; the partition allows {most or '?'}")
    if asked > allowed:
        return _finding("time limit", "wrong", f"{limit}, and the partition allows {most}", f"slurm.time_limit: {most}")
    return _finding("time limit", "ok", f"{limit} of {time_text(allowed)} that the partition allows")


def _longest_job(longest: str, most: str) -> Iterator[Finding]:
    """That jobs of several runs may grow longer than the partition takes; nothing where they cannot."""
    given, allowed = limit_seconds(longest), _seconds(most)
    if allowed is not None and not 0 < given <= allowed:
        has = longest if given else "sets no bound"
        found = f"slurm.max_time {has}, and the partition allows {most}: jobs of several runs may be refused"
        yield _finding("longest job", "doubt", found, f"slurm.max_time: {most}")


def _seconds(text: str) -> int | None:
    if not text or text.upper() in _ENDLESS or not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", text):
        return None
    return limit_seconds(text)


def _max_nodes(asked: int, most: str) -> Iterator[Finding]:
    if most.isdecimal() and asked > int(most):
        yield _finding("nodes", "wrong", f"{asked} are asked for, the partition allows {most}", f"--nodes {most}")


def _sharing(*, exclusive: bool, said: str) -> Iterator[Finding]:
    how = said.partition(":")[0]
    if exclusive and how == "FORCE":
        # slurm.conf(5), OverSubscribe: users cannot turn FORCE off.
        yield _finding(
            "exclusive",
            "wrong",
            f"OverSubscribe={said}: jobs share nodes whatever they ask for",
            "use another partition, or slurm.exclusive: false",
        )
    elif not exclusive and how != "EXCLUSIVE":
        yield _finding(
            "exclusive",
            "doubt",
            f"nodes are shared (OverSubscribe={said or '?'}): neighbours' load is part of the figures",
            "slurm.exclusive: true",
        )
    else:
        why = "whole nodes by the partition's policy" if how == "EXCLUSIVE" else "whole nodes are asked for"
        yield _finding("exclusive", "ok", why)


# Nodes


def _of_nodes(plan: LaunchPlan, nodes: Sequence[SlurmNode], partition: Mapping[str, str]) -> Iterator[Finding]:
    slurm = plan.system.slurm
    fitting, told = _with_features(nodes, slurm.constraint)
    if told is not None:
        yield told
    if not fitting:
        return
    usable = [node for node in fitting if node.is_usable]
    asked = plan.layout.nodes
    away = f"; {len(fitting) - len(usable)} down or drained" if len(usable) < len(fitting) else ""
    if len(usable) < asked:
        first = next(node for node in fitting if not node.is_usable) if away else None
        why = f" ({first.name}: {first.state}, {first.reason})" if first else ""
        yield _finding(
            "usable nodes",
            "wrong",
            f"{len(usable)} of {asked} asked for{away}{why}",
            "ask the cluster's admin, or use fewer nodes",
        )
    else:
        yield _finding("usable nodes", "ok", f"{len(usable)} of {len(fitting)}{away}")
    shown = usable or fitting
    yield _cores(plan, shown)
    yield from _gpus(plan, shown)
    yield _memory(plan, shown, partition)


def _with_features(nodes: Sequence[SlurmNode], constraint: str | None) -> tuple[list[SlurmNode], Finding | None]:
    """The nodes that a constraint leaves."""
    if constraint is None:
        return list(nodes), None
    if not re.fullmatch(r"[\w.:+-]+([|&][\w.:+-]+)*", constraint) or ("|" in constraint and "&" in constraint):
        return list(nodes), _finding("constraint", "unknown", f"{constraint}: is left to sbatch --test-only")
    words = re.split(r"[|&]", constraint)
    all_of: Callable[[Iterable[bool]], bool] = any if "|" in constraint else all
    fitting = [node for node in nodes if all_of(word in node.features for word in words)]
    if fitting:
        return fitting, _finding("constraint", "ok", f"{constraint}: {len(fitting)} of {len(nodes)} nodes")
    known = sorted({feature for node in nodes for feature in node.features})
    remedy = (
        f"slurm.constraint: {nearest(words[0], known)}" if known else "leave slurm.constraint out: no node has features"
    )
    return [], _finding("constraint", "wrong", f"no node of the partition has {constraint}", remedy)


def _cores(plan: LaunchPlan, nodes: Sequence[SlurmNode]) -> Finding:
    asked = plan.system.node.cores or 0
    least = min(nodes, key=lambda node: node.cpus)
    has = f"{least.cpus} CPUs ({least.shape_words})" if least.shape_words else f"{least.cpus} CPUs"
    if asked > least.cpus:
        return _finding(
            "cores", "wrong", f"node.cores {asked}, and {least.name} has {has}", f"node.cores: {least.cpus}"
        )
    if len({node.cpus for node in nodes}) > 1:
        return _finding(
            "cores",
            "doubt",
            f"node.cores {asked}; nodes are unlike, {least.name} has {has}",
            "choose one kind by slurm.constraint",
        )
    return _finding("cores", "ok", f"node.cores {asked} of {has}")


def _gpus(plan: LaunchPlan, nodes: Sequence[SlurmNode]) -> Iterator[Finding]:
    node, slurm = plan.system.node, plan.system.slurm
    some = next((one for one in nodes if one.gpus), None)
    if slurm.gpu_request == "none":
        if some is None:
            state: FindingState = "wrong" if node.gpus else "ok"
            if node.gpus:
                yield _finding(
                    "GPUs",
                    state,
                    f"node.gpus {node.gpus}, and Slurm knows none on these nodes",
                    "node.gpus: 0, or another partition",
                )
            return
        yield _finding("GPUs", "doubt", f"nodes have {some.gres}, and none is asked for", "set slurm.gpu_request")
        return
    wanted = node.gpus if slurm.gpu_count == "node" else plan.layout.ranks_per_node
    kind = slurm.gpu_type or ""
    named = f"{kind} " if kind else ""
    if some is None:
        yield _finding(
            "GPUs", "wrong", "Slurm knows none on these nodes", "slurm.gpu_request: none, or another partition"
        )
        return
    kinds = sorted({name for one in nodes for name, _ in one.gpus if name})
    fitting = [one for one in nodes if sum(count for name, count in one.gpus if not kind or name == kind) >= wanted]
    if kind and not any(name == kind for one in nodes for name, _ in one.gpus):
        remedy = (
            f"slurm.gpu_type: {nearest(kind, kinds)}" if kinds else "leave slurm.gpu_type out: Slurm was told no types"
        )
        yield _finding("GPUs", "wrong", f"no node has GPUs of type {kind}", remedy)
    elif len(fitting) < plan.layout.nodes:
        yield _finding(
            "GPUs",
            "wrong",
            f"{wanted} {named}of each node, and they have {some.gres}",
            f"node.gpus: {max((count for _, count in some.gpus))}",
        )
    else:
        yield _finding("GPUs", "ok", f"{wanted} {named}of each node, which have {some.gres}")


def _memory(plan: LaunchPlan, nodes: Sequence[SlurmNode], partition: Mapping[str, str]) -> Finding:
    slurm = plan.system.slurm
    has = f"nodes have {min(node.memory_mb for node in nodes)} MiB"
    if slurm.mem_per_gpu is not None or slurm.memory is not None:
        given = f"--mem-per-gpu={slurm.mem_per_gpu}" if slurm.mem_per_gpu is not None else f"--mem={slurm.memory}"
        return _finding("memory", "ok", f"{given}; {has}")
    for key in ("DefMemPerNode", "DefMemPerCPU"):
        if partition.get(key, "UNLIMITED").isdecimal():
            return _finding(
                "memory", "doubt", f"none is asked for, and jobs get {key}={partition[key]} MiB; {has}", "set slurm.mem"
            )
    return _finding("memory", "ok", f"none is asked for, and the partition sets no default; {has}")


# What does not hang on nodes


def _beside_nodes(plan: LaunchPlan, partition: Mapping[str, str] | None) -> Iterator[Finding]:
    yield from _account(plan, partition)
    yield from _plugin(plan)


def _account(plan: LaunchPlan, partition: Mapping[str, str] | None) -> Iterator[Finding]:
    slurm = plan.system.slurm
    for key, value in (("AllowAccounts", slurm.account), ("AllowQos", slurm.qos)):
        allowed = (partition or {}).get(key, "ALL")
        if value is not None and allowed not in ("ALL", "") and value not in allowed.split(","):
            name = "account" if key == "AllowAccounts" else "QOS"
            yield _finding(
                name,
                "wrong",
                f"the partition does not take {value}: {key}={allowed}",
                f"slurm.{name.lower()}: one of {allowed}",
            )
            return
    try:
        rows = associations(getpass.getuser(), slurm.clusters)
    except (UnansweredError, OSError, KeyError) as error:
        # sacctmgr's words without books: "You are not running a supported accounting_storage plugin".
        why = "Slurm keeps no accounts here" if "accounting_storage" in str(error) else str(error)
        yield _finding("account", "unknown", why)
        return
    accounts = sorted({row["Account"] for row in rows})
    if not rows:
        yield _finding("account", "unknown", "Slurm lists no account of this user")
        return
    if slurm.account is not None and slurm.account not in accounts:
        yield _finding(
            "account",
            "wrong",
            f"{slurm.account} is none of this user's",
            f"slurm.account: {nearest(slurm.account, accounts)}",
        )
        return
    mine = [row for row in rows if slurm.account in (None, row["Account"])]
    yield _finding("account", "ok", slurm.account or f"the user's default of {', '.join(accounts)}")
    qos = sorted({name for row in mine for name in (row.get("QOS") or "").split(",") if name})
    if slurm.qos is not None and qos:
        if slurm.qos not in qos:
            yield _finding(
                "QOS", "wrong", f"{slurm.qos} is not this account's", f"slurm.qos: {nearest(slurm.qos, qos)}"
            )
        else:
            yield _finding("QOS", "ok", slurm.qos)


def _plugin(plan: LaunchPlan) -> Iterator[Finding]:
    launch = plan.system.launch
    if launch.launcher != "srun-mpi":
        return
    try:
        plugins = mpi_plugins()
    except UnansweredError as error:
        yield _finding("MPI plugin", "unknown", str(error))
        return
    if launch.mpi_plugin in plugins:
        yield _finding("MPI plugin", "ok", launch.mpi_plugin)
    else:
        have = ", ".join(name for name in plugins if name != "none") or "none"
        yield _finding(
            "MPI plugin",
            "wrong",
            f"{launch.mpi_plugin} is none of: {have}",
            f"launch.mpi_plugin: {nearest(launch.mpi_plugin, plugins)}",
        )
