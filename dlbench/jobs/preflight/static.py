"""A system file against what Slurm says of itself, before anything is submitted."""

from __future__ import annotations

import getpass
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlbench.errors import nearest
from dlbench.jobs.scripts.job import limit_seconds, time_text
from dlbench.jobs.slurm.environment import asked
from dlbench.records.preflight import Finding, FindingState
from dlbench.specs.plan import LaunchPlan

# A value may hold blanks (Reason, OS); the next key begins with a capital letter.
_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z_]*)=(.*?)(?=\s+[A-Z][A-Za-z_]*=|\s*$)")
# Words of sinfo(1) in states of nodes that take no job; one that is powered down is started for a job.
_BAD = ("down", "drain", "fail", "maint", "unknown", "inval", "future")
_POWER = re.compile(r"power(ed|ing)_(down|up)")


class UnansweredError(Exception):
    """Slurm gave no answer; the message says why, in a few words."""


def ask(*command: str, clusters: Sequence[str] = ()) -> str:
    """Standard output of one of Slurm's programs.

    `clusters`: which to ask; none: the one that answers.
    Raises `UnansweredError`: it is not here, failed or did not answer.
    """
    if shutil.which(command[0]) is None:
        raise UnansweredError(f"{command[0]} is not on PATH")
    done = asked([command[0], *([f"--clusters={','.join(clusters)}"] if clusters else []), *command[1:]])
    if isinstance(done, str):
        raise UnansweredError(done)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise UnansweredError(f"{command[0]}: {said[:200] or f'it ended with {done.returncode}'}")
    # `srun --mpi=list` writes to standard error in older versions.
    return done.stdout if done.stdout.strip() else done.stderr


def pairs(line: str) -> dict[str, str]:
    """A line of `scontrol show ... --oneliner` as its keys and values."""
    return {key: value.strip() for key, value in _PAIR.findall(line)}


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
    """One node as sinfo lists it."""

    name: str
    cpus: int
    shape: str  # Sockets, cores of each, threads of each: ``2:32:2``.
    memory_mb: int
    gres: str
    features: frozenset[str]
    state: str
    reason: str

    @property
    def is_usable(self) -> bool:
        """Whether a job could ever be put there: it is neither down nor drained."""
        state = _POWER.sub("", self.state.lower())
        return not any(word in state for word in _BAD) and not state.endswith("*")

    @property
    def gpus(self) -> tuple[tuple[str, int], ...]:
        """Its GPUs by type, which is empty where Slurm has none configured."""
        return gpus_in(self.gres)

    @property
    def shape_words(self) -> str:
        """E.g. ``2 sockets of 32 cores, 2 threads each``."""
        parts = self.shape.split(":")
        if len(parts) != 3:
            return ""
        sockets, cores, threads = parts
        of = f"{sockets} socket{'s' * (sockets != '1')} of {cores} core{'s' * (cores != '1')}"
        return of if threads == "1" else f"{of}, {threads} threads each"


def gpus_in(gres: str) -> tuple[tuple[str, int], ...]:
    """GPUs of a list of generic resources such as ``gpu:a100:4(S:0-1),nvme:1``."""
    found = []
    for part in re.split(r",(?![^()]*\))", gres):
        words = part.partition("(")[0].split(":")
        if words[0] == "gpu" and len(words) in (2, 3) and words[-1].isdecimal():
            found.append((words[1] if len(words) == 3 else "", int(words[-1])))
    return tuple(found)


def partitions(clusters: Sequence[str] = ()) -> dict[str, Mapping[str, str]]:
    """All partitions by name, each with what scontrol says of it. Raises `UnansweredError`: as `ask`."""
    text = ask("scontrol", "show", "partition", "--oneliner", clusters=clusters)
    lines = [pairs(line) for line in text.splitlines() if line.strip()]
    return {line["PartitionName"]: line for line in lines if "PartitionName" in line}


def nodes_of(partition: str, clusters: Sequence[str] = ()) -> list[SlurmNode]:
    """The nodes of a partition, or of several with commas between them. Raises `UnansweredError`: as `ask`."""
    words = ("--noheader", "--Node", f"--partition={partition}", "--format=%N|%c|%z|%m|%G|%f|%T|%E")
    text = ask("sinfo", *words, clusters=clusters)
    found: dict[str, SlurmNode] = {}
    for line in text.splitlines():
        parts = line.strip().split("|", 7)
        if len(parts) != 8:
            continue
        name, cpus, shape, memory, gres, features, state, reason = (part.strip() for part in parts)
        found[name] = SlurmNode(
            name=name,
            cpus=_number(cpus),
            shape=shape,
            memory_mb=_number(memory),
            gres="" if gres == "(null)" else gres,
            features=frozenset() if features == "(null)" else frozenset(features.split(",")),
            state=state,
            reason=reason,
        )
    return list(found.values())


def _number(text: str) -> int:
    """A count as sinfo writes it; of several kinds of nodes in one line the least: ``64+``."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def mpi_plugins() -> list[str]:
    """What `srun --mpi=` takes here. Raises `UnansweredError`: as `ask`."""
    text = ask("srun", "--mpi=list")
    # "MPI plugin types are..." and "specific pmix plugin versions available: pmix_v4" stand among the names.
    return sorted({word for line in text.splitlines() for word in _plugin_words(line)})


def _plugin_words(line: str) -> Sequence[str]:
    line = line.removeprefix("srun:").strip()
    _, colon, after = line.rpartition(":")
    words = (after if colon else line).replace(",", " ").split()
    return words if colon or len(words) == 1 else ()


def associations(user: str, clusters: Sequence[str] = ()) -> list[Mapping[str, str]]:
    """What a user may use: Account, Partition, QOS of each association.

    Raises `UnansweredError`: as `ask`; also where Slurm keeps no accounts.
    """
    columns = ("Account", "Partition", "QOS")
    which = [f"user={user}", *([f"cluster={','.join(clusters)}"] if clusters else [])]
    lines = ask("sacctmgr", "--noheader", "--parsable2", "show", "associations", *which, f"format={','.join(columns)}")
    found = [dict(zip(columns, line.split("|"), strict=False)) for line in lines.splitlines() if "|" in line]
    return [row for row in found if row.get("Account")]


_ENDLESS = ("UNLIMITED", "INFINITE", "NONE")


def static_findings(plan: LaunchPlan) -> list[Finding]:
    """All findings, in the order of a system file; none of them starts anything."""
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
        remedy = f"slurm.partition: {nearest(missing[0], known)}"
        return [], _finding("partition", "wrong", f"there is none of the name {missing[0]}", remedy)
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
        longest, limit = slurm.max_time, said.get("MaxTime", "")
        allowed = _seconds(limit)
        if allowed is not None and not 0 < limit_seconds(longest) <= allowed:
            has = longest if limit_seconds(longest) else "sets no bound"
            found = f"slurm.max_time {has}, and the partition allows {limit}: jobs of several runs may be refused"
            yield _finding("longest job", "doubt", found, f"slurm.max_time: {limit}")
        asked, most = plan.layout.nodes, said.get("MaxNodes", "")
        if most.isdecimal() and asked > int(most):
            yield _finding("nodes", "wrong", f"{asked} are asked for, the partition allows {most}", f"--nodes {most}")
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


def _seconds(text: str) -> int | None:
    if not text or text.upper() in _ENDLESS or not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", text):
        return None
    return limit_seconds(text)


def _sharing(*, exclusive: bool, said: str) -> Iterator[Finding]:
    how = said.partition(":")[0]
    if exclusive and how == "FORCE":
        # slurm.conf(5), OverSubscribe: users cannot turn FORCE off.
        remedy = "use another partition, or slurm.exclusive: false"
        yield _finding("exclusive", "wrong", f"OverSubscribe={said}: jobs share nodes whatever they ask for", remedy)
    elif not exclusive and how != "EXCLUSIVE":
        found = f"nodes are shared (OverSubscribe={said or '?'}): neighbours' load is part of the figures"
        yield _finding("exclusive", "doubt", found, "slurm.exclusive: true")
    else:
        why = "whole nodes by the partition's policy" if how == "EXCLUSIVE" else "whole nodes are asked for"
        yield _finding("exclusive", "ok", why)


# Nodes


def _of_nodes(plan: LaunchPlan, nodes: Sequence[SlurmNode], partition: Mapping[str, str]) -> Iterator[Finding]:
    slurm = plan.system.slurm
    fitting, finding = _with_features(nodes, slurm.constraint)
    if finding is not None:
        yield finding
    if not fitting:
        return
    usable = [node for node in fitting if node.is_usable]
    asked = plan.layout.nodes
    away = f"; {len(fitting) - len(usable)} down or drained" if len(usable) < len(fitting) else ""
    if len(usable) < asked:
        first = next(node for node in fitting if not node.is_usable) if away else None
        why = f" ({first.name}: {first.state}, {first.reason})" if first else ""
        remedy = "ask the cluster's admin, or use fewer nodes"
        yield _finding("usable nodes", "wrong", f"{len(usable)} of {asked} asked for{away}{why}", remedy)
    else:
        yield _finding("usable nodes", "ok", f"{len(usable)} of {len(fitting)}{away}")
    shown = usable or fitting
    yield _cores(plan, shown)
    yield from _gpus(plan, shown)
    yield _memory(plan, shown, partition)


def _with_features(nodes: Sequence[SlurmNode], constraint: str | None) -> tuple[list[SlurmNode], Finding | None]:
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
        remedy = "choose one kind by slurm.constraint"
        return _finding("cores", "doubt", f"node.cores {asked}; nodes are unlike, {least.name} has {has}", remedy)
    return _finding("cores", "ok", f"node.cores {asked} of {has}")


def _gpus(plan: LaunchPlan, nodes: Sequence[SlurmNode]) -> Iterator[Finding]:
    node, slurm = plan.system.node, plan.system.slurm
    some = next((one for one in nodes if one.gpus), None)
    if slurm.gpu_request == "none":
        if some is None:
            state: FindingState = "wrong" if node.gpus else "ok"
            if node.gpus:
                remedy = "node.gpus: 0, or another partition"
                yield _finding("GPUs", state, f"node.gpus {node.gpus}, and Slurm knows none on these nodes", remedy)
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
        remedy = f"slurm.gpu_type: {nearest(kind, kinds)}" if kinds else "leave slurm.gpu_type out: Slurm has no types"
        yield _finding("GPUs", "wrong", f"no node has GPUs of type {kind}", remedy)
    elif len(fitting) < plan.layout.nodes:
        remedy = f"node.gpus: {max((count for _, count in some.gpus))}"
        yield _finding("GPUs", "wrong", f"{wanted} {named}of each node, and they have {some.gres}", remedy)
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
            remedy = f"slurm.{name.lower()}: one of {allowed}"
            yield _finding(name, "wrong", f"the partition does not take {value}: {key}={allowed}", remedy)
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
        remedy = f"slurm.account: {nearest(slurm.account, accounts)}"
        yield _finding("account", "wrong", f"{slurm.account} is none of this user's", remedy)
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
        remedy = f"launch.mpi_plugin: {nearest(launch.mpi_plugin, plugins)}"
        yield _finding("MPI plugin", "wrong", f"{launch.mpi_plugin} is none of: {have}", remedy)
