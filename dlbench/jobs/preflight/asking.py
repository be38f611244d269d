"""What Slurm says of itself: partitions, nodes, associations, plugins. By outputs that are the same from 21.08 on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlbench.jobs.slurm.environment import call

# A value may hold blanks (Reason, OS); the next key begins with a capital letter.
_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z_]*)=(.*?)(?=\s+[A-Z][A-Za-z_]*=|\s*$)")
# Words of sinfo(1) in states of nodes that take no job; one that is powered down is started for a job.
_BAD = ("down", "drain", "fail", "maint", "unknown", "inval", "future")
_POWER = re.compile(r"power(ed|ing)_(down|up)")


class UnansweredError(Exception):
    """Slurm gave no answer; the message says why, in a few words."""


def ask(*command: str, clusters: Sequence[str] = ()) -> str:
    """Standard output of one of Slurm's programs.

    Args:
        command: its words.
        clusters: which to ask; none: the one that answers.

    Raises:
        UnansweredError: it is not here, failed or did not answer.
    """
    try:
        done = call([command[0], *([f"--clusters={','.join(clusters)}"] if clusters else []), *command[1:]])
    except FileNotFoundError:
        raise UnansweredError(f"{command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired as late:
        raise UnansweredError(f"{command[0]} gave no answer within {late.timeout:g} s") from None
    except OSError as error:
        raise UnansweredError(f"{command[0]} cannot be started: {error.strerror or error}") from None
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
    shape: str
    """Sockets, cores of each, threads of each: ``2:32:2``."""
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
        """Its GPUs by type, which is empty where Slurm was told none."""
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
    """All partitions by name, each with what scontrol says of it.

    Raises:
        UnansweredError: as `ask`.
    """
    text = ask("scontrol", "show", "partition", "--oneliner", clusters=clusters)
    lines = [pairs(line) for line in text.splitlines() if line.strip()]
    return {line["PartitionName"]: line for line in lines if "PartitionName" in line}


def nodes_of(partition: str, clusters: Sequence[str] = ()) -> list[SlurmNode]:
    """The nodes of a partition, or of several with commas between them.

    Raises:
        UnansweredError: as `ask`.
    """
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
    """What `srun --mpi=` takes here.

    Raises:
        UnansweredError: as `ask`.
    """
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

    Raises:
        UnansweredError: as `ask`; also where Slurm keeps no accounts.
    """
    columns = ("Account", "Partition", "QOS")
    which = [f"user={user}", *([f"cluster={','.join(clusters)}"] if clusters else [])]
    lines = ask("sacctmgr", "--noheader", "--parsable2", "show", "associations", *which, f"format={','.join(columns)}")
    found = [dict(zip(columns, line.split("|"), strict=False)) for line in lines.splitlines() if "|" in line]
    return [row for row in found if row.get("Account")]
