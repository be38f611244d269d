"""What a box needs of the machine below it: programs, processes, free ports and networks, folders.

Processes are known by pid and start time. What a box made is written into its folder before it is made, so that a later
process can end exactly that: `box.json` holds the plan and every process; after the end it is called
`box.stopped.json`, the mark of a folder that a new box may clear. Only what this user or root wrote there is believed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Any

from dlbench.errors import EnvironmentLacksError, RunError, UserError
from tests.slurm_box.config import BoxPlan, Equipment

# Daemons live in sbin, which is not on every user's PATH.
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
DAEMON_ENVIRONMENT = {"PATH": SEARCH_PATH, "LC_ALL": "C"}
"""All that the daemons inherit: nothing of the user's variables ends up in a job by this way."""

_PACKAGE_OF = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}


@dataclass(frozen=True)
class Process:
    """A process that a box started. A later one with its pid has another start time (clock ticks since boot)."""

    role: str
    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses, which may hold anything, spaces and parentheses included.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """What distinguishes this boot of the machine from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def program(name: str) -> str:
    """The path of a program. Raises `EnvironmentLacksError`: it is not installed."""
    path = shutil.which(name, path=SEARCH_PATH)
    if path is None:
        raise EnvironmentLacksError(f"no program {name}: install {_PACKAGE_OF.get(name, 'it')}")
    return path


def call(
    argv: list[str], timeout_s: float = 20, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> str:
    """Run a command to its end and return its output.

    Raises `EnvironmentLacksError`: the program is not installed. `RunError`: it failed, or took longer than `timeout_s`
    seconds.
    """
    command = [program(argv[0]), *argv[1:]]
    variables = {**os.environ, **DAEMON_ENVIRONMENT, **(environment or {})}
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=variables,
            pass_fds=pass_fds,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"`{' '.join(argv)}` did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().replace("\n", "; ") or f"exit code {done.returncode}"
        raise RunError(f"`{' '.join(argv)}` failed: {reason}")
    return done.stdout


def spawn(role: str, argv: list[str], log: Path, environment: Mapping[str, str] | None = None) -> Process:
    """Start a daemon that outlives this process; its output is appended to `log`."""
    # Not subprocess.Popen: that warns about every child which its parent does not wait for.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    # A session of its own: Ctrl-C and the end of the terminal do not reach it.
    variables = {**DAEMON_ENVIRONMENT, **(environment or {})}
    pid = os.posix_spawn(program(argv[0]), argv, variables, file_actions=files, setsid=True)
    # As a zombie it would have no start time: 0 then stands for a process that is gone.
    return Process(role, pid, start_ticks(pid) or 0)


def end(processes: Iterable[Process], grace_s: float) -> None:
    """End processes: ask them, and after `grace_s` seconds make them. Those that are gone already are left alone."""
    waiting = list(processes)
    for sent, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        waiting = [process for process in waiting if process.is_alive()]
        for process in waiting:
            with suppress(ProcessLookupError):
                os.kill(process.pid, sent)
        deadline = time.monotonic() + limit_s
        while any(process.is_alive() for process in waiting) and time.monotonic() < deadline:
            time.sleep(0.02)


def reap(processes: Iterable[Process]) -> None:
    """Take the exit codes of ended children, if they are this process's."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def processes_in(namespace: str) -> list[Process]:
    """Every process that lives in a network namespace: a daemon, its steps and all they started."""
    try:
        home = Path("/run/netns", namespace).stat()
    except OSError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            net = (entry / "ns" / "net").stat()
            ticks = start_ticks(int(entry.name))
            if (net.st_dev, net.st_ino) == (home.st_dev, home.st_ino) and ticks is not None:
                found.append(Process(namespace, int(entry.name), ticks))
    return found


def processes_with(environment: Mapping[str, str]) -> list[Process]:
    """Every process of this user that was started with these variables, also one that nobody could write down in time.

    A process of another user may carry them too; it is none of ours.
    """
    wanted = {f"{name}={value}".encode() for name, value in environment.items()}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            ticks = start_ticks(int(entry.name))
            is_own = entry.stat().st_uid == os.geteuid()
            if is_own and ticks is not None and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(Process("unnamed", int(entry.name), ticks))
    return found


def kernel_names(prefix: str) -> Iterator[tuple[str, str]]:
    """Kind (`link` or `netns`) and name of every interface and network namespace that is called so."""
    for kind, place in (("link", Path("/sys/class/net")), ("netns", Path("/run/netns"))):
        for entry in place.iterdir() if place.is_dir() else ():
            if entry.name.startswith(prefix):
                yield kind, entry.name


def remove_links(prefix: str) -> list[str]:
    """Remove network namespaces and interfaces that are called so; returns a sentence for each that stays."""
    failures = []
    for kind, name in list(kernel_names(prefix)):
        if kind == "netns":
            failures += _failure(["ip", "netns", "delete", name])
        # Removing one end of a veth pair removes the other at once, whoever still holds its namespace.
        elif Path(f"/sys/class/net/{name}").exists():
            failures += _failure(["ip", "link", "delete", name])
    return failures


def _failure(argv: list[str]) -> list[str]:
    try:
        call(argv)
    except (RunError, EnvironmentLacksError) as error:
        return [str(error)]
    return []


def wait_until(condition: Callable[[], bool], deadline: float, pause_s: float = 0.05) -> bool:
    """Ask `condition` again and again until it holds (True) or `deadline`, a monotonic time in seconds, has passed."""
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
    return True


def is_listening(port: int) -> bool:
    """Whether any process listens on a TCP port here (asked of the kernel: a test connection would be logged)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
    return False


def free_token() -> str:
    """Four hexadecimal digits that no interface and no network namespace of a box has in its name."""
    while True:
        token = f"{random.randrange(16**4):04x}"
        if not list(kernel_names(f"dlb{token}")):
            return token


def free_port() -> int:
    """A TCP port that nothing uses, from below the range that the kernel gives to outgoing connections."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise RunError("no free TCP port between 20000 and 31999")


def free_subnet(within: IPv4Network, prefix: int) -> IPv4Network:
    """A network of the given prefix length that overlaps none this machine has a route to."""
    routes = json.loads(call(["ip", "-json", "-4", "route", "show", "table", "all"]))
    # Default routes, and the few that lead to half of the world, do not make every network a used one.
    used = [ip_network(route["dst"]) for route in routes if route["dst"] != "default"]
    used = [network for network in used if network.prefixlen > 1]
    candidates = list(within.subnets(new_prefix=prefix))
    for subnet in random.sample(candidates, len(candidates)):
        if not any(subnet.overlaps(network) for network in used):
            return subnet
    raise RunError(f"every network in {within} is in use on this machine")


def requirements(more: Mapping[str, str]) -> list[str]:
    """What this machine lacks for a box, a sentence with its remedy for each thing; empty if nothing is missing.

    `more`: programs that it needs beyond the usual ones, with the package of each.
    """
    lacks = []
    if os.geteuid() != 0:
        lacks.append("not root: a box makes network namespaces, run as root (in a container: --privileged)")
    for name, package in (_PACKAGE_OF | dict(more)).items():
        if shutil.which(name, path=SEARCH_PATH) is None:
            lacks.append(f"no program {name}: install {package} (Debian, Ubuntu: apt install {package})")
    return lacks


def network_lacks(token: str) -> list[str]:
    """Really make one bridge and one node, and take them away again: capabilities and kernels lie."""
    namespace, bridge, veth = f"dlb{token}p", f"dlb{token}b", f"dlb{token}q"
    try:
        call(["ip", "netns", "add", namespace])
        call(["ip", "link", "add", bridge, "type", "bridge"])
        call(["ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", namespace])
        call(["ip", "link", "set", veth, "master", bridge])
        enter = ["nsenter", f"--net=/run/netns/{namespace}"]
        call([*enter, "unshare", "--mount", "--propagation", "slave", "--uts", "true"])
    except RunError as error:
        remedy = "run with CAP_NET_ADMIN and CAP_SYS_ADMIN (in a container: --privileged)"
        return [f"network namespaces, bridges or private mounts do not work here ({error}): {remedy}"]
    finally:
        remove_links(f"dlb{token}")
    return []


def check_owner(folder: Path) -> None:
    """Refuses a folder that is a link, or that, like its `box.json`, others own or may write. Raises `UserError`."""
    for path in (folder, _running(folder)):
        if not path.exists() and not path.is_symlink():
            continue
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) or status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise UserError(
                f"a box in {folder} cannot be trusted: {path} is a link, or others own or may write it and could "
                "change what the box does as root; name a new folder"
            )


def write_new(path: Path, content: str, mode: int = 0o644) -> None:
    """Writes a file anew."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(content)


def _running(folder: Path) -> Path:
    return folder / "box.json"


def _stopped(folder: Path) -> Path:
    return folder / "box.stopped.json"


def save_state(plan: BoxPlan, processes: Iterable[Process], first: bool = False) -> None:
    """Write the state in one piece; with `first`, only if no other process did so in the meantime.

    Raises `UserError`: another box is being started in this folder.
    """
    state: dict[str, Any] = {
        "boot_id": boot_id(),
        "plan": {**asdict(plan), "folder": str(plan.folder), "subnet": str(plan.subnet)},
        "processes": [asdict(process) for process in processes],
    }
    path = _running(plan.folder)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    write_new(new, json.dumps(state, indent=2) + "\n")
    if not first:
        new.replace(path)
        return
    try:
        os.link(new, path)
    except FileExistsError:
        raise UserError(f"another process is starting a box in {plan.folder}") from None
    finally:
        new.unlink()


def load_state(folder: Path) -> tuple[BoxPlan, list[Process]]:
    """The plan and the processes of the box in a folder.

    Raises `UserError`: there is none, or somebody else could have written its state.
    """
    path = _running(folder.absolute())
    check_owner(path.parent)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        # The file's own folder, not the one it names: what is ended must be what is looked at.
        plan = {**state["plan"], "folder": path.parent, "subnet": IPv4Network(state["plan"]["subnet"])}
        # JSON has lists only, and a plan that is compared with another has none.
        has: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in plan["equipment"].items()
        }
        plan["equipment"] = Equipment(**has)
        processes = [Process(**process) for process in state["processes"]]
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no box runs in {folder}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no state of a box: {error!r}") from None
    # After a reboot the same numbers mean other processes.
    return BoxPlan(**plan), processes if state["boot_id"] == boot_id() else []


def is_present(folder: Path) -> bool:
    """Whether a box was started here and not stopped; its processes may be dead all the same."""
    return _running(folder).exists()


def mark_stopped(folder: Path) -> None:
    """Say that all is gone."""
    _running(folder).replace(_stopped(folder))


def is_stopped(folder: Path) -> bool:
    """Whether the last box here was stopped as it should be."""
    return _stopped(folder).exists() and not is_present(folder)


def clear_state(folder: Path) -> None:
    """Make the folder, or empty it where a box was stopped. Raises `UserError`: it holds files that are no box's."""
    check_owner(folder)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Names that a killed process had not yet given to its state are a box's, too.
    strange = [entry for entry in folder.iterdir() if not entry.name.startswith(".box.json.")]
    if strange and not is_stopped(folder):
        raise UserError(f"{folder} holds files that are no box's: name a new or an empty folder")
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
