"""What a box has beyond nodes with processors: devices, features, partitions, switches, memory, cores.

All of it is off unless asked for. Values are in Slurm's own words, so that a site's lines can be taken as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlbench.errors import UserError
from dlbench.jobs.box.storage import parse_rate

_WORD = r"[A-Za-z0-9._:,/+\-\[\]()*|&%]+"
_LINE = re.compile(rf"[A-Za-z0-9._-]+( [A-Za-z]+\+?=-?{_WORD})*")
_GRES = re.compile(r"([a-z][a-z0-9_]*)(?::([A-Za-z0-9._-]+))?:([1-9]\d{0,3})")
_OF_NODE = re.compile(rf"(?:(n[1-8])=)?({_WORD})")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Gres:
    """One kind of device of a node: `kind` is empty where Slurm is told none."""

    name: str
    kind: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """What a box is asked to have.

    Attributes:
        gres: counted devices without files, such as ``gpu:a100:4``; of all nodes, or of one: ``n1=gpu:a100:4,nic:2``.
        features: what --constraint asks for, such as ``a100,nvlink``; of all nodes, or of one: ``n2=h100``.
        partitions: a name and words of slurm.conf each, such as ``debug Nodes=n1 MaxTime=30``; the first is the
            default one. Without any there is one, `box`.
        switches: leaf switches below one root (topology/tree); the nodes are dealt to them in order. 0: no topology.
        sockets: of a node; then cores are what is given to jobs, and tasks are bound to them where the machine has
            so many. 0: processors are given.
        threads_per_core: with `sockets`.
        memory_mb: MiB of a node that jobs ask for with --mem; 0: memory is not counted.
        preempt: whose jobs yield to others and are requeued: those of a `qos`, of a `partition`, or of `none`.
        accounting: whether slurmdbd keeps books: sacct, accounts, QOS and their limits, which are then enforced.
        accounts: with accounting, of every user; the first is the default. Without any there is one, `box`.
        qos: with accounting, a name and words of sacctmgr each, such as ``high Priority=100 Preempt=normal``; every
            user may use each, and `normal` is always there.
        users: of this machine, who may use the box beside root.
        private_jobs: whether users see only their own jobs.
        pfs: rate of a throttled file system, such as ``10MB/s``, that all nodes share in the box's folder.
    """

    gres: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    switches: int = 0
    sockets: int = 0
    threads_per_core: int = 1
    memory_mb: int = 0
    private_jobs: bool = False
    preempt: str = "none"
    accounting: bool = False
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    pfs: str = ""

    def gres_of(self, node: str) -> tuple[Gres, ...]:
        """The devices of a node, in the order in which they were given."""
        return tuple(_gres(word) for word in ",".join(_of_node(self.gres, node)).split(",") if word)

    def features_of(self, node: str) -> str:
        """The features of a node, with commas between them; empty if it has none."""
        return ",".join(_of_node(self.features, node))

    @property
    def gres_names(self) -> tuple[str, ...]:
        """Every name of a device on any node, each once."""
        nodes = [f"n{index}" for index in range(1, 9)]
        return tuple(dict.fromkeys(gres.name for node in nodes for gres in self.gres_of(node)))

    @property
    def tracked_gres(self) -> tuple[str, ...]:
        """What accounting counts: each device by its name, and by its kind where it has one."""
        found = [gres for index in range(1, 9) for gres in self.gres_of(f"n{index}")]
        names = [f"gres/{gres.name}" for gres in found]
        kinds = [f"gres/{gres.name}:{gres.kind}" for gres in found if gres.kind]
        return tuple(dict.fromkeys(names + kinds))

    @property
    def partition_names(self) -> tuple[str, ...]:
        return tuple(line.split()[0] for line in self.partitions) or ("box",)

    def partition_lines(self) -> list[str]:
        """What follows `PartitionName=` for each partition: what was asked for, and what goes without saying."""
        lines = []
        for index, line in enumerate(self.partitions or ("box",)):
            usual = {"Nodes": "ALL", "Default": "NO" if index else "YES", "MaxTime": "INFINITE", "DefaultTime": "60"}
            said = {word.partition("=")[0].casefold() for word in line.split()[1:]}
            if "maxtime" in said:
                del usual["DefaultTime"]  # it may be longer
            lines.append(
                " ".join([line, *(f"{k}={v}" for k, v in usual.items() if k.casefold() not in said), "State=UP"])
            )
        return lines

    @property
    def account_names(self) -> tuple[str, ...]:
        return self.accounts or ("box",)

    @property
    def user_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(["root", *self.users]))

    @property
    def select_parameters(self) -> str:
        """Slurm's SelectTypeParameters."""
        return ("CR_Core" if self.sockets else "CR_CPU") + ("_Memory" if self.memory_mb else "")

    def leaves(self, nodes: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The nodes of each leaf switch: neighbours together, as even as it goes."""
        share, rest = divmod(len(nodes), self.switches)
        leaves, begin = [], 0
        for index in range(self.switches):
            end = begin + share + (index < rest)
            leaves.append(nodes[begin:end])
            begin = end
        return leaves


def check(equipment: Equipment, nodes: int, cpus_per_node: int) -> None:
    """Refuses what no box can have.

    Raises:
        UserError: names the option's value.
    """
    for text in equipment.gres:
        if not _OF_NODE.fullmatch(text):
            raise UserError(f"{text!r} is no gres: write gpu:4, gpu:a100:4, or n1=gpu:a100:4 for one node")
    for text in equipment.features:
        if not _OF_NODE.fullmatch(text):
            raise UserError(f"{text!r} are no features: write a100,nvlink, or n1=a100,nvlink for one node")
    for index in range(1, nodes + 1):
        equipment.gres_of(f"n{index}")
    for line in equipment.partitions:
        if not _LINE.fullmatch(line):
            raise UserError(f"{line!r} is no partition: write a name and words of slurm.conf, as 'debug MaxTime=30'")
    if equipment.pfs:
        parse_rate(equipment.pfs)
    _check_books(equipment)
    if not 0 <= equipment.switches <= nodes:
        raise UserError(f"a box of {nodes} nodes has 0 to {nodes} leaf switches, not {equipment.switches}")
    units = equipment.sockets * equipment.threads_per_core
    if equipment.sockets < 0 or equipment.threads_per_core < 1 or (units and cpus_per_node % units):
        raise UserError(
            f"{cpus_per_node} processors are not {equipment.sockets} sockets of whole cores with "
            f"{equipment.threads_per_core} threads"
        )


def _check_books(equipment: Equipment) -> None:
    if equipment.preempt not in ("none", "qos", "partition"):
        raise UserError(f"jobs yield by qos, partition or none, not {equipment.preempt!r}")
    if not equipment.accounting:
        if equipment.accounts or equipment.qos or equipment.users or equipment.preempt == "qos":
            raise UserError("accounts, QOS and users are kept in books: a box has them with accounting")
        return
    for line in equipment.qos:
        if not _LINE.fullmatch(line):
            raise UserError(f"{line!r} is no QOS: write a name and words of sacctmgr, as 'high Preempt=normal'")
    for name in (*equipment.accounts, *equipment.users):
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} is no name of an account or a user")


def _of_node(texts: tuple[str, ...], node: str) -> list[str]:
    """What was said of all nodes and of this one."""
    found = [_OF_NODE.fullmatch(text) for text in texts]
    return [match[2] for match in found if match and match[1] in (None, node)]


def _gres(word: str) -> Gres:
    match = _GRES.fullmatch(word)
    if match is None:
        raise UserError(f"{word!r} is no gres: write NAME:COUNT or NAME:TYPE:COUNT, e.g. gpu:a100:4")
    return Gres(name=match[1], kind=match[2] or "", count=int(match[3]))
