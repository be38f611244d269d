"""What a box is made of, as text: a plan becomes slurm.conf, hosts and command lines. Nothing here is run.

A box is a whole Slurm cluster on one machine. Its nodes are network namespaces joined by one bridge, or by one for each
leaf switch; the machine itself is the login node. What it has beyond nodes with processors (devices, features,
partitions, switches, memory) is off unless asked for, in Slurm's own words.

slurmdbd keeps its books in MySQL or MariaDB only. The server here has a socket in the box's folder and no network; only
root reaches the socket, so that rights need no checks. Its files are in memory that only its own mounts show: on a
disk, slurmdbd's tables alone took 8 s, and nothing is left of it once it ends.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import jinja2

from dlbench.errors import UserError

MAX_NODES = 8
CONTROLLER_HOST = "boxctl"
NODE_INTERFACE = "eth0"  # The name of the one interface, besides `lo`, that every node has.
SLURMD_PORT = 6818  # Every node has a network of its own, so all can use Slurm's usual port.
SUBNETS = IPv4Network("198.18.0.0/15")  # Set aside for benchmarks of network equipment (RFC 2544): no site routes it.
SUBNET_PREFIX = 28
MAX_FOLDER_CHARS = 60  # A socket's path has at most 107 bytes, and slurmstepd's are up to 45 below the folder.
_DATABASE_MIB = 512  # The most that it may take; the books of a hundred jobs are 20 MiB, most of it empty tables.
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


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
        gres: counted devices of every node, such as ``gpu:a100:4``; nobody opens their files.
        features: what --constraint asks for, such as ``a100,nvlink``.
        partitions: a name and words of slurm.conf each, such as ``debug Nodes=n1 MaxTime=30``; the first is the
            default one. Without any there is one, `box`.
        switches: leaf switches below one root (topology/tree), each a bridge of its own with an uplink; the nodes are
            dealt to them in order. 0: no topology.
        memory_mb: MiB of a node that jobs ask for with --mem; 0: memory is not counted.
        preempt: whose jobs yield to others and are requeued: those of a `qos`, of a `partition`, or of `none`.
        accounting: whether slurmdbd keeps books: sacct, accounts, QOS and their limits, which are then enforced.
        accounts: with accounting, of every user; the first is the default. Without any there is one, `box`.
        qos: with accounting, a name and words of sacctmgr each, such as ``high Priority=100 Preempt=normal``; every
            user may use each, and `normal` is always there.
        users: of this machine, who may use the box besides root.
    """

    gres: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    switches: int = 0
    memory_mb: int = 0
    preempt: str = "none"
    accounting: bool = False
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    users: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Gres, ...]:
        """The devices of each node, in the order in which they were given."""
        words = ",".join(self.gres).split(",")
        return tuple(_gres(word) for word in words if word)

    @property
    def gres_names(self) -> tuple[str, ...]:
        """Every name of a device, each once."""
        return tuple(dict.fromkeys(gres.name for gres in self.devices))

    @property
    def tracked_gres(self) -> tuple[str, ...]:
        """What accounting counts: each device by its name, and by its kind where it has one."""
        names = [f"gres/{gres.name}" for gres in self.devices]
        kinds = [f"gres/{gres.name}:{gres.kind}" for gres in self.devices if gres.kind]
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

    def leaves(self, nodes: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The nodes of each leaf switch: neighbours together, as even as it goes."""
        share, rest = divmod(len(nodes), self.switches)
        leaves, begin = [], 0
        for index in range(self.switches):
            end = begin + share + (index < rest)
            leaves.append(nodes[begin:end])
            begin = end
        return leaves


def _gres(word: str) -> Gres:
    name, *kind, count = word.split(":")
    return Gres(name=name, kind="".join(kind), count=int(count))


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

    Attributes:
        token: part of every name in the kernel, so that boxes coexist.
        memory_mb: MiB that each node claims to have.
        login_name: the machine's own host name.
        database_port: slurmdbd's; 0: there is none.
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


def absolute_folder(folder: Path) -> Path:
    """The folder as an absolute path. Raises `UserError`: slurm.conf cannot hold it, or it is too long for sockets."""
    absolute = folder.absolute()
    # Slurm's configuration has no quoting: a space ends a value, # begins a comment, % begins a pattern.
    if not re.fullmatch(rf"[A-Za-z0-9._/@+-]{{1,{MAX_FOLDER_CHARS}}}", str(absolute)):
        raise UserError(
            f"a box cannot live in {str(absolute)!r}: slurm.conf holds only letters, digits and . _ / @ + -, and its "
            f"sockets leave room for {MAX_FOLDER_CHARS} characters; use a path such as /tmp/box"
        )
    return absolute


def render(template: str, **values: object) -> str:
    """The text of one of the templates."""
    return _TEMPLATES.get_template(template).render(**values)


def render_slurm_conf(plan: BoxPlan) -> str:
    """The text of slurm.conf."""
    return render(
        "slurm.conf.j2",
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
    words.append(f"RealMemory={plan.memory_mb}")
    if has.gres:
        words.append(f"Gres={','.join(has.gres)}")
    if has.features:
        words.append(f"Feature={','.join(has.features)}")
    return " ".join([*words, "State=UNKNOWN"])


def device_files(plan: BoxPlan) -> list[tuple[Gres, range]]:
    """Each kind of device with the numbers of its files; the nodes share them, because nobody opens them."""
    files = []
    count: Counter[str] = Counter()
    for gres in plan.equipment.devices:
        first = count[gres.name]
        count[gres.name] += gres.count
        files.append((gres, range(first, first + gres.count)))
    return files


def render_gres_conf(plan: BoxPlan) -> str:
    """The text of gres.conf."""
    lines = []
    for gres, numbers in device_files(plan):
        kind = f" Type={gres.kind}" if gres.kind else ""
        lines.append(f"Name={gres.name}{kind} File={plan.devices / gres.name}[{numbers[0]}-{numbers[-1]}]")
    return render("gres.conf.j2", lines=lines)


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
    directions, or free it (None)."""
    links = [(["tc"], node.veth, rate) for node in plan.nodes]
    links += [(["tc", "-n", node.namespace], NODE_INTERFACE, rate) for node in plan.nodes]
    links += [(["tc"], end, uplink) for _, *ends in plan.leaf_links for end in ends]
    commands = []
    for tc, interface, limit in links:
        words = f"qdisc del dev {interface} root"
        if limit is not None:
            words = f"qdisc replace dev {interface} root tbf rate {limit} burst 64kb latency 50ms"
        commands.append([*tc, *words.split()])
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
    command = ["slurmd", "-D", "-f", str(plan.conf)]
    return ["nsenter", f"--net=/run/netns/{node.namespace}", *in_own_mounts(plan, node.name, command, mounts)]


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
        f"mount -t tmpfs -o mode=0700,size={_DATABASE_MIB}m tmpfs {shlex.quote(str(data))}",
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
