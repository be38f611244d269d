"""What a box is made of, as text: a plan becomes slurm.conf, hosts and command lines. Nothing here is run.

A box is a whole Slurm cluster on one machine. Its nodes are network namespaces joined by one bridge, or by one for each
leaf switch; the machine itself is the login node. What it has beyond nodes with processors (devices, features,
partitions, switches, memory, cores) is off unless asked for, and asked for in Slurm's own words, so that a site's lines
can be taken as they are.

slurmdbd keeps its books in MySQL or MariaDB only. The server here has a socket in the box's folder and no network; only
root reaches the socket, so that rights need no checks. Its files are in memory that only its own mounts show: on a
disk, slurmdbd's tables alone took 8 s, and nothing is left of it once it ends.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from dlbench.errors import UserError
from dlbench.jobs.scripts.job import render

CONTROLLER = Path("/sys/fs/cgroup/blkio")
_RATE = re.compile(r"([1-9]\d{0,5})(k|M|G)B/s")
_FACTOR = {"k": 10**3, "M": 10**6, "G": 10**9}


def parse_rate(text: str) -> int:
    """Bytes per second of a rate such as ``10MB/s``. Raises `UserError`: it is none."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is no rate of a file system: write a number and kB/s, MB/s or GB/s, e.g. 10MB/s")
    return int(match[1]) * _FACTOR[match[2]]


_WORD = r"[A-Za-z0-9._:,/+\-\[\]()*|&%]+"
_LINE = re.compile(rf"[A-Za-z0-9._-]+( [A-Za-z]+\+?=-?{_WORD})*")
_GRES = re.compile(r"([a-z][a-z0-9_]*)(?::([A-Za-z0-9._-]+))?:([1-9]\d{0,3})")
_OF_NODE = re.compile(rf"(?:(n[1-8])=)?({_WORD})")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Gres:
    """One kind of device of a node: `kind` is empty where Slurm is given none."""

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
        switches: leaf switches below one root (topology/tree), each a bridge of its own with an uplink; the nodes are
            dealt to them in order. 0: no topology.
        sockets: of a node; then cores are what is given to jobs, and tasks are bound to them where the machine has
            that many. 0: processors are given.
        threads_per_core: with `sockets`.
        memory_mb: MiB of a node that jobs ask for with --mem; 0: memory is not counted.
        preempt: whose jobs yield to others and are requeued: those of a `qos`, of a `partition`, or of `none`.
        accounting: whether slurmdbd keeps books: sacct, accounts, QOS and their limits, which are then enforced.
        accounts: with accounting, of every user; the first is the default. Without any there is one, `box`.
        qos: with accounting, a name and words of sacctmgr each, such as ``high Priority=100 Preempt=normal``; every
            user may use each, and `normal` is always there.
        users: of this machine, who may use the box besides root.
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


def check_equipment(equipment: Equipment, nodes: int, cpus_per_node: int) -> None:
    """Refuses what no box can have. Raises `UserError`: names the option's value."""
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


MAX_NODES = 8
CONTROLLER_HOST = "boxctl"
NODE_INTERFACE = "eth0"  # The name of the one interface, besides `lo`, that every node has.
SLURMD_PORT = 6818  # Every node has a network of its own, so all can use Slurm's usual port.
SUBNETS = IPv4Network("198.18.0.0/15")  # Set aside for benchmarks of network equipment (RFC 2544): no site routes it.
SUBNET_PREFIX = 28
MAX_FOLDER_CHARS = 60  # A socket's path has at most 107 bytes, and slurmstepd's are up to 45 below the folder.


@dataclass(frozen=True, kw_only=True)
class BoxNode:
    """One node: its name in Slurm, its address, its network namespace, the host's end of its link and its bridge."""

    name: str
    address: IPv4Address
    namespace: str
    veth: str
    bridge: str


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
    def leaf_links(self) -> tuple[tuple[str, str, str], ...]:
        """Of each leaf switch its bridge, and both ends of its uplink: at the root and at the leaf."""
        prefix, leaves = self.kernel_prefix, range(1, self.equipment.switches + 1)
        return tuple((f"{prefix}s{leaf}", f"{prefix}u{leaf}", f"{prefix}d{leaf}") for leaf in leaves)

    @property
    def nodes(self) -> tuple[BoxNode, ...]:
        names = tuple(f"n{index}" for index in range(1, self.num_nodes + 1))
        bridges: dict[str, str] = {}
        if self.leaf_links:
            for (bridge, _, _), leaf in zip(self.leaf_links, self.equipment.leaves(names), strict=True):
                bridges |= dict.fromkeys(leaf, bridge)
        return tuple(
            BoxNode(
                name=name,
                address=self.subnet[index + 1],
                namespace=f"{self.kernel_prefix}n{index}",
                veth=f"{self.kernel_prefix}v{index}",
                bridge=bridges.get(name, self.bridge),
            )
            for index, name in enumerate(names, 1)
        )

    def output(self, role: str) -> Path:
        """What one daemon (`munged`, `slurmctld` or `slurmd.<node>`) says; Slurm's have a log with times next to it."""
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
    """Refuse a number of nodes or processors that no box can have. Raises `UserError`: one of them is out of range."""
    if not 1 <= nodes <= MAX_NODES:
        raise UserError(f"a box has 1 to {MAX_NODES} nodes, not {nodes}")
    if not 1 <= cpus_per_node <= 512:
        raise UserError(f"a node of a box has 1 to 512 processors, not {cpus_per_node}")


def absolute_folder(folder: Path) -> Path:
    """The folder as an absolute path, if Slurm can be given it.

    Raises `UserError`: a character that slurm.conf cannot hold, or a path too long for Slurm's sockets.
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
    if features := _of_node(has.features, node.name):
        words.append(f"Feature={','.join(features)}")
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
    """The commands that make the bridges, the namespaces and their links, in order."""
    prefix = plan.subnet.prefixlen
    commands = [
        ["ip", "link", "add", plan.bridge, "type", "bridge"],
        ["ip", "address", "add", f"{plan.bridge_address}/{prefix}", "dev", plan.bridge],
        ["ip", "link", "set", plan.bridge, "up"],
    ]
    for leaf, at_root, at_leaf in plan.leaf_links:
        commands += [
            ["ip", "link", "add", leaf, "type", "bridge"],
            ["ip", "link", "add", at_root, "type", "veth", "peer", "name", at_leaf],
            ["ip", "link", "set", at_root, "master", plan.bridge, "up"],
            ["ip", "link", "set", at_leaf, "master", leaf, "up"],
            ["ip", "link", "set", leaf, "up"],
        ]
    for node in plan.nodes:
        inside = ["ip", "-n", node.namespace]
        peer = ["peer", "name", NODE_INTERFACE, "netns", node.namespace]
        commands += [
            ["ip", "netns", "add", node.namespace],
            ["ip", "link", "add", node.veth, "type", "veth", *peer],
            ["ip", "link", "set", node.veth, "master", node.bridge, "up"],
            [*inside, "address", "add", f"{node.address}/{prefix}", "dev", NODE_INTERFACE],
            [*inside, "link", "set", NODE_INTERFACE, "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    return commands


def shape(plan: BoxPlan, rate: str | None, uplink: str | None = None) -> list[list[str]]:
    """The commands that limit every node's link, and every leaf switch's uplink, to a rate such as ``200mbit`` in both
    directions, or free it (None).

    Raises `UserError`: a rate is none that `tc` understands, or there are no uplinks.
    """
    if uplink is not None and not plan.leaf_links:
        raise UserError("a box has uplinks with leaf switches: start it with --switches 2 or more")
    links = [(["tc"], node.veth, rate) for node in plan.nodes]
    links += [(["tc", "-n", node.namespace], NODE_INTERFACE, rate) for node in plan.nodes]
    links += [(["tc"], end, uplink) for _, *ends in plan.leaf_links for end in ends]
    for one in (rate, uplink):
        if one is not None and not re.fullmatch(r"[1-9]\d{0,5}(\.\d{1,3})?[kmg]bit", one):
            raise UserError(f"{one!r} is no rate of a link: write a number and kbit, mbit or gbit, e.g. 200mbit")
    return [
        [*tc, "qdisc", "del", "dev", interface, "root"]
        if one is None
        else [*tc, *f"qdisc replace dev {interface} root tbf rate {one} burst 64kb latency 50ms".split()]
        for tc, interface, one in links
    ]


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


_MOST_MIB = 512  # Of the database; the books of a hundred jobs are 20 MiB, most of it empty tables.


def database_folder(plan: BoxPlan) -> Path:
    """Where the database lies; others have no way into it."""
    return plan.folder / "db"


def database_socket(plan: BoxPlan) -> Path:
    """Where MariaDB answers."""
    return database_folder(plan) / "socket"


def mariadbd_argv(plan: BoxPlan) -> list[str]:
    """The command line of the database server, which makes its own tables first."""
    data = database_folder(plan) / "data"
    command = [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={data}",
        f"--tmpdir={data}",
        f"--socket={database_socket(plan)}",
        f"--pid-file={database_folder(plan) / 'pid'}",
        "--skip-networking",
        "--skip-grant-tables",
        "--skip-log-bin",
        "--performance-schema=OFF",
        "--max-connections=50",
        "--innodb-buffer-pool-size=16M",
        "--innodb-log-file-size=4M",
    ]
    steps = [
        f"mkdir {shlex.quote(str(data))}",
        f"mount -t tmpfs -o mode=0700,size={_MOST_MIB}m tmpfs {shlex.quote(str(data))}",
        f"mkdir {shlex.quote(str(data / 'mysql'))}",
        # slurmdbd has procedures of its own, which are kept in a table of the system.
        "for share in /usr/share/mysql /usr/share/mariadb; do [ -f $share/mysql_system_tables.sql ] && break; done",
        f"{{ echo 'USE mysql;'; cat $share/mysql_system_tables.sql; }} | {shlex.join(command)} --bootstrap",
        f"exec {shlex.join(command)}",
    ]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(steps)]


def slurmdbd_argv(plan: BoxPlan) -> list[str]:
    """The command line of slurmdbd; its configuration is found next to slurm.conf."""
    command = ["env", f"SLURM_CONF={plan.conf}", f"MYSQL_UNIX_PORT={database_socket(plan)}", "slurmdbd", "-D"]
    return in_own_mounts(plan, CONTROLLER_HOST, command)


def render_slurmdbd_conf(plan: BoxPlan) -> str:
    """The text of slurmdbd.conf, which only its owner may read, or slurmdbd refuses it."""
    return render("box/slurmdbd.conf.j2", plan=plan, controller_host=CONTROLLER_HOST)


def first_entries(plan: BoxPlan) -> list[list[str]]:
    """The commands that write the cluster, its QOS, accounts and users into the empty database."""
    has = plan.equipment
    accounts, users = has.accounts or ("box",), dict.fromkeys(["root", *has.users])
    commands = [["add", "cluster", f"box{plan.token}"]]
    names = [line.split()[0] for line in has.qos]
    # All names first: a QOS may preempt one that comes later.
    if new := [name for name in names if name != "normal"]:
        commands.append(["add", "qos", ",".join(new)])
    for line in has.qos:
        name, *words = line.split()
        if words:
            commands.append(["modify", "qos", name, "set", *words])
    everything = f"qos={','.join(dict.fromkeys(['normal', *names]))}"
    for account in accounts:
        commands.append(["add", "account", account, everything])
        commands.append(["add", "user", ",".join(users), f"account={account}"])
    # root has an account of its own from the start, with the usual QOS only.
    commands.append(["modify", "user", "root", "set", f"DefaultAccount={accounts[0]}", everything])
    return [["sacctmgr", "--immediate", "--quiet", *command] for command in commands]
