"""What a box is made of, as text: a plan becomes slurm.conf, hosts and command lines. Nothing here is run.

A box is a whole Slurm cluster on one machine. Its nodes are network namespaces joined by one
bridge; the machine itself is the login node. Running it is left to `box` and `box_host`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from dlbench.errors import UserError
from dlbench.jobs.box.equipment import Equipment
from dlbench.jobs.box.storage import CONTROLLER
from dlbench.jobs.scripts.job import render

MAX_NODES = 8
CONTROLLER_HOST = "boxctl"
NODE_INTERFACE = "eth0"
"""The name of the one interface, beside `lo`, that every node has."""
SLURMD_PORT = 6818
"""Every node has a network of its own, so all can use Slurm's usual port."""
SUBNETS = IPv4Network("198.18.0.0/15")
"""Set aside for benchmarks of network equipment (RFC 2544): no site routes it."""
SUBNET_PREFIX = 28
MAX_FOLDER_CHARS = 60
"""A socket's path has at most 107 bytes, and slurmstepd's are up to 45 below the folder."""


@dataclass(frozen=True, kw_only=True)
class BoxNode:
    """One node: its name in Slurm, its address, its network namespace and the host's end of its link."""

    name: str
    address: IPv4Address
    namespace: str
    veth: str


@dataclass(frozen=True, kw_only=True)
class BoxPlan:
    """One box, fully decided.

    `token` is part of every name in the kernel, so that boxes coexist; `memory_mb` is what each
    node claims to have, in MiB; `login_name` is the machine's own host name; `database_port`
    is slurmdbd's; `binds_tasks`: task/affinity, which needs
    the processors that a node claims to have.
    """

    folder: Path
    token: str
    num_nodes: int
    cpus_per_node: int
    memory_mb: int
    subnet: IPv4Network
    controller_port: int
    login_name: str
    database_port: int = 0
    binds_tasks: bool = False
    equipment: Equipment = field(default_factory=Equipment)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts"

    @property
    def munge_key(self) -> Path:
        return self.folder / "munge" / "key"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def mark(self) -> dict[str, str]:
        """What every process of the box has in its environment from its first moment."""
        return {"DLBENCH_BOX": f"{self.folder}:{self.token}"}

    @property
    def kernel_prefix(self) -> str:
        """How the names of everything begin that the box has in the kernel."""
        return f"dlb{self.token}"

    @property
    def storage(self) -> tuple[Path, Path, Path]:
        """Of the throttled file system: image, mount point, and the cgroup of the processes that it is slow for."""
        return self.folder / "pfs.img", self.folder / "pfs", CONTROLLER / self.kernel_prefix

    @property
    def devices(self) -> Path:
        return self.folder / "dev"

    @property
    def bridge(self) -> str:
        return self.kernel_prefix

    @property
    def bridge_address(self) -> IPv4Address:
        return self.subnet[1]

    @property
    def nodes(self) -> tuple[BoxNode, ...]:
        return tuple(
            BoxNode(
                name=f"n{index}",
                address=self.subnet[index + 1],
                namespace=f"{self.kernel_prefix}n{index}",
                veth=f"{self.kernel_prefix}v{index}",
            )
            for index in range(1, self.num_nodes + 1)
        )

    def output(self, role: str) -> Path:
        """What one daemon (`munged`, `slurmctld` or `slurmd.<node>`) says; Slurm's have a log with times beside it."""
        return self.folder / "log" / f"{role}.out"

    def folders(self) -> list[Path]:
        """Every folder the daemons expect to find."""
        per_node = [self.folder / f"{kind}.{node.name}" for node in self.nodes for kind in ("spool", "sys", "tmp")]
        database = [self.folder / "db"] if self.equipment.accounting else []
        return [self.folder / "log", self.folder / "munge", self.folder / "state", *per_node, *database]

    @property
    def roles(self) -> list[str]:
        """The daemons, in the order in which they start."""
        books = ["mariadbd", "slurmdbd"] if self.equipment.accounting else []
        return ["munged", *books, "slurmctld", *(f"slurmd.{node.name}" for node in self.nodes)]


def check_size(nodes: int, cpus_per_node: int) -> None:
    """Refuse a number of nodes or processors that no box can have.

    Raises:
        UserError: one of them is out of range.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise UserError(f"a box has 1 to {MAX_NODES} nodes, not {nodes}")
    if not 1 <= cpus_per_node <= 512:
        raise UserError(f"a node of a box has 1 to 512 processors, not {cpus_per_node}")


def check_folder(folder: Path) -> Path:
    """The folder as an absolute path, if Slurm can be told of it.

    Raises:
        UserError: a character that slurm.conf cannot hold, or a path too long for Slurm's sockets.
    """
    absolute = folder.absolute()
    # Slurm's configuration has no quoting: a space ends a value, # begins a comment, % begins a pattern.
    if not re.fullmatch(r"[A-Za-z0-9._/@+-]+", str(absolute)):
        raise UserError(
            f"a box cannot live in {str(absolute)!r}: slurm.conf cannot quote, so the path may hold only "
            "letters, digits and . _ / @ + - (no spaces)"
        )
    if len(str(absolute)) > MAX_FOLDER_CHARS:
        raise UserError(
            f"a box cannot live in {absolute}: the path has {len(str(absolute))} characters, and Slurm's "
            f"sockets in it leave room for {MAX_FOLDER_CHARS}; use a shorter one such as /tmp/box"
        )
    return absolute


def render_slurm_conf(plan: BoxPlan) -> str:
    """The text of slurm.conf."""
    return render(
        "box/slurm.conf.j2",
        plan=plan,
        has=plan.equipment,
        nodes=[_node_line(plan, node) for node in plan.nodes],
        partitions=plan.equipment.partition_lines(),
        controller_host=CONTROLLER_HOST,
        slurmd_port=SLURMD_PORT,
    )


def _node_line(plan: BoxPlan, node: BoxNode) -> str:
    has = plan.equipment
    words = [f"NodeName={node.name}", f"NodeAddr={node.address}", f"CPUs={plan.cpus_per_node}"]
    if has.sockets:
        cores = plan.cpus_per_node // has.sockets // has.threads_per_core
        words += [f"Sockets={has.sockets}", f"CoresPerSocket={cores}", f"ThreadsPerCore={has.threads_per_core}"]
    words.append(f"RealMemory={plan.memory_mb}")
    if devices := has.gres_of(node.name):
        words.append("Gres=" + ",".join(":".join(filter(None, (g.name, g.kind, str(g.count)))) for g in devices))
    if features := has.features_of(node.name):
        words.append(f"Feature={features}")
    return " ".join([*words, "State=UNKNOWN"])


def render_gres_conf(plan: BoxPlan) -> str:
    """The text of gres.conf."""
    lines = []
    for node in plan.nodes:
        begin: dict[str, int] = {}
        for gres in plan.equipment.gres_of(node.name):
            first = begin.get(gres.name, 0)
            begin[gres.name] = first + gres.count
            kind = f" Type={gres.kind}" if gres.kind else ""
            files = plan.devices / f"{gres.name}[{first}-{first + gres.count - 1}]"
            lines.append(f"NodeName={node.name} Name={gres.name}{kind} File={files}")
    return render("box/gres.conf.j2", lines=lines)


def device_files(plan: BoxPlan) -> list[Path]:
    """Every file that gres.conf names; the nodes share them, because nobody opens them."""
    most: dict[str, int] = {}
    for node in plan.nodes:
        here: dict[str, int] = {}
        for gres in plan.equipment.gres_of(node.name):
            here[gres.name] = here.get(gres.name, 0) + gres.count
        most |= {name: max(count, most.get(name, 0)) for name, count in here.items()}
    return [plan.devices / f"{name}{index}" for name, count in most.items() for index in range(count)]


def render_topology_conf(plan: BoxPlan) -> str:
    """The text of topology.conf, if the box has switches."""
    return render("box/topology.conf.j2", leaves=plan.equipment.leaves(tuple(node.name for node in plan.nodes)))


def render_cgroup_conf(version: tuple[int, int]) -> str:
    """The text of cgroup.conf for a Slurm version such as (22, 5)."""
    return render("box/cgroup.conf.j2", version=version)


def render_hosts(plan: BoxPlan) -> str:
    """The text of /etc/hosts as the nodes and the controller see it.

    The machine itself is in it by its bridge address: steps call back to the srun that made them.
    """
    names = {node.name: node.address for node in plan.nodes}
    # A machine that is called like a node is then reached by the controller's name only.
    here = [CONTROLLER_HOST] + ([plan.login_name] if plan.login_name not in names else [])
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{plan.bridge_address} {' '.join(here)}"]
    return "\n".join(lines + [f"{address} {name}" for name, address in names.items()]) + "\n"


def network_up(plan: BoxPlan) -> list[list[str]]:
    """The commands that make the bridge, the namespaces and their links, in order."""
    prefix = plan.subnet.prefixlen
    commands = [
        ["ip", "link", "add", plan.bridge, "type", "bridge"],
        ["ip", "address", "add", f"{plan.bridge_address}/{prefix}", "dev", plan.bridge],
        ["ip", "link", "set", plan.bridge, "up"],
    ]
    for node in plan.nodes:
        inside = ["ip", "-n", node.namespace]
        peer = ["peer", "name", NODE_INTERFACE, "netns", node.namespace]
        commands += [
            ["ip", "netns", "add", node.namespace],
            ["ip", "link", "add", node.veth, "type", "veth", *peer],
            ["ip", "link", "set", node.veth, "master", plan.bridge, "up"],
            [*inside, "address", "add", f"{node.address}/{prefix}", "dev", NODE_INTERFACE],
            [*inside, "link", "set", NODE_INTERFACE, "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    return commands


def shape(plan: BoxPlan, rate: str | None) -> list[list[str]]:
    """The commands that limit every link to a rate such as ``200mbit`` in both directions, or free it (None).

    Raises:
        UserError: the rate is none that `tc` understands.
    """
    if rate is not None and not re.fullmatch(r"[1-9]\d{0,5}(\.\d{1,3})?[kmg]bit", rate):
        raise UserError(f"{rate!r} is no rate of a link: write a number and kbit, mbit or gbit, e.g. 200mbit")
    limit = [] if rate is None else ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
    verb = ["del" if rate is None else "replace"]
    commands = []
    for node in plan.nodes:
        for tc, interface in (["tc"], node.veth), (["tc", "-n", node.namespace], NODE_INTERFACE):
            commands.append([*tc, "qdisc", *verb, "dev", interface, "root", *limit])
    return commands


def in_own_mounts(plan: BoxPlan, name: str, command: list[str], mounts: tuple[str, ...] = ()) -> list[str]:
    """The command with a host name, an /etc/hosts and perhaps more mounts (lines of shell) of its own."""
    steps = [
        # Written by the kernel file: the program `hostname` is not everywhere.
        f"printf %s {shlex.quote(name)} > /proc/sys/kernel/hostname",
        f"mount --bind {shlex.quote(str(plan.hosts))} /etc/hosts",
        *mounts,
        f"cd {shlex.quote(str(plan.folder))}",
        f"exec {shlex.join(command)}",
    ]
    # Slave: what is mounted on the machine later appears on the nodes where the machine's mounts
    # are shared (systemd makes them so), and nothing that a node mounts comes back.
    return ["unshare", "--mount", "--propagation", "slave", "--uts", "sh", "-ec", "\n".join(steps)]


def munged_argv(plan: BoxPlan) -> list[str]:
    """The command line of the box's own munged."""
    folder = plan.folder / "munge"
    # --force: folders of tests are closed to other users, and munged takes that for a mistake.
    return [
        "munged",
        "--foreground",
        "--force",
        "--num-threads=2",
        f"--key-file={plan.munge_key}",
        f"--socket={plan.munge_socket}",
        f"--pid-file={folder / 'pid'}",
        f"--seed-file={folder / 'seed'}",
    ]


def slurmctld_argv(plan: BoxPlan) -> list[str]:
    """The command line of the controller; -c forgets the jobs of an earlier box in this folder."""
    command = ["slurmctld", "-D", "-c", "-f", str(plan.conf)]
    return in_own_mounts(plan, CONTROLLER_HOST, command)


def slurmd_argv(plan: BoxPlan, node: BoxNode) -> list[str]:
    """The command line of one node's daemon; it takes its name from the host name it finds."""
    sysfs = shlex.quote(str(plan.folder / f"sys.{node.name}"))
    mounts: tuple[str, ...] = (
        # Two nodes do not share memory; and what a killed rank left there goes away with the node.
        "if [ -d /dev/shm ]; then mount -t tmpfs -o mode=1777 tmpfs /dev/shm; fi",
        # /sys shows the interfaces of the network it was mounted in: without these lines a node would
        # read the counters of the machine's eth0 as its own. The rest of /sys stays, because in a new
        # one (`ip netns exec` makes such) slurmd finds no cgroup file system.
        f"mount -t sysfs sysfs {sysfs}",
        f"mount --bind {sysfs}/class/net /sys/class/net",
        f"mount --bind {sysfs}/devices/virtual/net /sys/devices/virtual/net",
        f"umount {sysfs}",
    )
    if plan.equipment.pfs:
        # All that a node starts shares the throttle with all that the others start.
        mounts += (f"echo 0 > {shlex.quote(str(plan.storage[2] / 'cgroup.procs'))}",)
    command = ["slurmd", "-D", "-f", str(plan.conf)]
    return ["nsenter", f"--net=/run/netns/{node.namespace}", *in_own_mounts(plan, node.name, command, mounts)]
