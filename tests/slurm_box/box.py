"""A real Slurm cluster in one box: munged, slurmctld and some slurmd, each of these in a network of its own.

What it is for: batch scripts, launchers and all-reduces between nodes are tried for real without a cluster. The machine
itself is the login node. `config` says how the parts are configured, `host` what is asked of the machine, and what a
box made and has to end.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from dlbench.errors import DlbenchError, EnvironmentLacksError, RunError, UserError
from tests.slurm_box import config, host
from tests.slurm_box.config import BoxPlan, Equipment
from tests.slurm_box.host import Process

_PLAIN = Equipment()
_STARTER = "box start"  # The role of the process that starts a box, while it does.
_BOOKS = {"slurmdbd": "slurmdbd", "sacctmgr": "slurm-client", "mariadbd": "mariadb-server-core"}


def check_requirements(has: Equipment = _PLAIN) -> list[str]:
    """What this machine lacks for a box, one line with its remedy for each thing; empty if a box can run."""
    return host.requirements(_BOOKS if has.accounting else {}) or host.network_lacks(host.free_token())


@final
@dataclass
class Box:
    """One running box. Use it as a context manager, or call `stop`."""

    plan: BoxPlan
    processes: list[Process] = field(default_factory=list)

    @classmethod
    def start(
        cls, folder: Path, nodes: int = 2, cpus_per_node: int = 2, timeout_s: float = 60, has: Equipment = _PLAIN
    ) -> Box:
        """Start a box that keeps its files in `folder`, and wait until every node is idle.

        `has` says what it has beyond nodes with processors. A node may have more processors than the machine. Jobs of
        an earlier box in the folder are forgotten. If anything goes wrong on the way, all that was
        started is ended again.

        Raises `UserError`: a folder that cannot be, that others could write, or where a box already runs.
        `EnvironmentLacksError`: the machine lacks something; the message says what and the remedy.
        `RunError`: the cluster did not come up within `timeout_s` seconds; the message names the log.
        """
        deadline = time.monotonic() + timeout_s
        if not 1 <= nodes <= config.MAX_NODES:
            raise UserError(f"a box has 1 to {config.MAX_NODES} nodes, not {nodes}")
        folder = config.absolute_folder(folder)
        host.check_owner(folder)
        _refuse_lacks(host.requirements(_BOOKS if has.accounting else {}))
        if host.is_present(folder):
            earlier = cls.attach(folder)
            # What an interrupted start left is no box.
            if earlier.is_up and any(process.is_alive() for process in earlier.processes):
                raise UserError(f"a box already runs in {folder}: `python -m tests.slurm_box stop {folder}` ends it")
            earlier.stop()
        host.clear_state(folder)
        box = cls(
            BoxPlan(
                folder=folder,
                token=host.free_token(),
                num_nodes=nodes,
                cpus_per_node=cpus_per_node,
                memory_mb=has.memory_mb or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
                subnet=host.free_subnet(config.SUBNETS, config.SUBNET_PREFIX),
                controller_port=host.free_port(),
                login_name=socket.gethostname().partition(".")[0],
                database_port=host.free_port() if has.accounting else 0,
                equipment=has,
            )
        )
        box.processes.append(Process(_STARTER, os.getpid(), host.start_ticks(os.getpid()) or 0))
        host.save_state(box.plan, box.processes, first=True)
        try:
            # Its names are the box's, so that a start that is killed in it leaves nothing that is not known.
            _refuse_lacks(host.network_lacks(box.plan.token))
            box._bring_up(deadline)
            box.processes = [process for process in box.processes if process.role != _STARTER]
            host.save_state(box.plan, box.processes)
        except BaseException:
            box.stop()
            raise
        return box

    @classmethod
    def attach(cls, folder: Path) -> Box:
        """The box that was started in `folder`, by whichever process.

        Raises `UserError`: there is none.
        """
        plan, processes = host.load_state(folder)
        return cls(plan, processes)

    @staticmethod
    def was_stopped(folder: Path) -> bool:
        """Whether the last box in `folder` was stopped as it should be."""
        return host.is_stopped(folder)

    @property
    def is_up(self) -> bool:
        """Whether its start came to its end."""
        return all(process.role != _STARTER for process in self.processes)

    @property
    def conf(self) -> Path:
        """The absolute path of slurm.conf."""
        return self.plan.conf

    @property
    def environment(self) -> dict[str, str]:
        """What a process must have in its environment to use this cluster."""
        return {"SLURM_CONF": str(self.plan.conf)}

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes' names in Slurm, which are their host names too."""
        return tuple(node.name for node in self.plan.nodes)

    def is_alive(self) -> bool:
        """Whether every daemon of the box runs."""
        alive = {process.role for process in self.processes if process.is_alive()}
        return alive >= set(self.plan.roles)

    def node_states(self) -> dict[str, str]:
        """Slurm's word for the state of each node, such as ``idle`` or ``mixed``.

        Raises `RunError`: the controller does not answer.
        """
        lines = host.call(["sinfo", "--noheader", "--Node", "--format=%N %T"], environment=self.environment)
        return {line.split()[0]: line.split()[1] for line in lines.splitlines() if line.strip()}

    def shape(self, rate: str | None, uplink: str | None = None) -> None:
        """Limit the link of every node, and the uplink of every leaf switch, in both directions, to a rate such as
        ``200mbit``; None frees them, which does nothing to those without a limit.

        Traffic with the login node is limited too; traffic inside a node and the file system are not.

        Raises `RunError`: a rate is none, or the kernel has no token bucket filter.
        """
        for command in config.shape(self.plan, rate, uplink):
            try:
                host.call(command)
            except RunError as error:
                # tc's words for a link without a limit, in its older and its newer versions.
                is_free = "No such file" in str(error) or "handle of zero" in str(error)
                if not ("del" in command and is_free):
                    raise

    def stop(self) -> None:
        """End all that this box started and remove its networks. Its files stay, for reading logs.

        What an interrupted start left is removed too.

        Raises `UserError`: another process is starting it at this moment. `RunError`: something could not be removed;
        calling `stop` again tries again.
        """
        if not host.is_present(self.plan.folder):
            return
        for starter in self.processes:
            if starter.role == _STARTER and starter.pid != os.getpid() and starter.is_alive():
                raise UserError(f"process {starter.pid} is starting a box in {self.plan.folder}: end it first")
        self._cancel_jobs()
        daemons = {process.role: process for process in self.processes if process.role != _STARTER}
        last = [daemons.pop(role) for role in self.plan.roles if role in daemons and not role.startswith("slurmd.")]
        host.end(daemons.values(), grace_s=3)
        # Steps outlive their slurmd, and what a job started outlives its step. Two rounds: one may be forking.
        for _ in range(2):
            host.end([found for node in self.plan.nodes for found in host.processes_in(node.namespace)], grace_s=0)
        # One after the other: slurmctld hands its last words to slurmdbd, and that to the database.
        for daemon in reversed(last):
            host.end([daemon], grace_s=5)
        for _ in range(2):
            host.end(host.processes_with(self.plan.mark), grace_s=0)
        host.reap(self.processes)
        failures = host.remove_links(self.plan.kernel_prefix)
        failures += [f"{left.role} (pid {left.pid}) does not end" for left in self._left()]
        if failures:
            raise RunError(f"the box in {self.plan.folder} is not wholly gone: {'; '.join(failures)}")
        host.mark_stopped(self.plan.folder)

    def _left(self) -> list[Process]:
        return [process for process in self.processes if process.role != _STARTER and process.is_alive()]

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _bring_up(self, deadline: float) -> None:
        plan = self.plan
        for part in plan.folders():
            part.mkdir(mode=0o755, exist_ok=True)
        self._write_configuration()
        for command in config.network_up(plan):
            host.call(command, environment=plan.mark)
        self._spawn("munged", config.munged_argv(plan))
        self._wait(lambda: _answers(plan.munge_socket), deadline, "munged", "munged did not open its socket")
        if plan.equipment.accounting:
            self._open_books(deadline)
        self._spawn("slurmctld", config.slurmctld_argv(plan))
        self._wait(
            lambda: host.is_listening(plan.controller_port), deadline, "slurmctld", "slurmctld did not open its port"
        )
        for node in plan.nodes:
            self._spawn(f"slurmd.{node.name}", config.slurmd_argv(plan, node))
        self._wait(self._nodes_are_idle, deadline, "slurmctld", "not all nodes became idle")
        # A firewall that filters bridges would else hang every job.
        first, last = self.plan.nodes[0], self.plan.nodes[-1]
        target = f"({str(last.address)!r}, {config.SLURMD_PORT})"
        code = f"import socket; socket.create_connection({target}, 5).close()"
        try:
            host.call(["nsenter", f"--net=/run/netns/{first.namespace}", sys.executable, "-I", "-S", "-c", code])
        except RunError:
            raise EnvironmentLacksError(
                f"the nodes of a box cannot reach each other over the bridge {self.plan.bridge}: a firewall of this "
                "machine filters bridges; `sysctl -w net.bridge.bridge-nf-call-iptables=0` lets them pass"
            ) from None

    def _open_books(self, deadline: float) -> None:
        """Start the database and slurmdbd, and enter the cluster: slurmctld finds itself there."""
        plan = self.plan
        config.database_folder(plan).chmod(0o700)
        self._spawn("mariadbd", config.mariadbd_argv(plan))
        self._wait(
            lambda: _answers(config.database_socket(plan)), deadline, "mariadbd", "the database did not open its socket"
        )
        self._spawn("slurmdbd", config.slurmdbd_argv(plan))
        self._wait(
            lambda: host.is_listening(plan.database_port), deadline, "slurmdbd", "slurmdbd did not open its port"
        )
        for command in config.first_entries(plan):
            host.call(command, environment={**self.environment, **plan.mark})

    def _write_configuration(self) -> None:
        plan = self.plan
        descriptor = os.open(plan.munge_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as key:
            key.write(secrets.token_bytes(128))
        # Such as "slurm-wlm 22.05.8".
        words = host.call(["slurmd", "-V"]).split()[-1].split(".")
        version = (int(words[0]), int(words[1]))
        host.write_new(plan.hosts, config.render_hosts(plan))
        host.write_new(plan.folder / "cgroup.conf", config.render("cgroup.conf.j2", version=version))
        if plan.equipment.gres:
            plan.devices.mkdir(mode=0o755)
            for gres, numbers in config.device_files(plan):
                for number in numbers:
                    device = plan.devices / f"{gres.name}{number}"
                    os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
            host.write_new(plan.folder / "gres.conf", config.render_gres_conf(plan))
        if plan.equipment.switches:
            host.write_new(
                plan.folder / "topology.conf",
                config.render("topology.conf.j2", leaves=plan.equipment.leaves(self.node_names)),
            )
        if plan.equipment.accounting:
            text = config.render("slurmdbd.conf.j2", plan=plan, controller_host=config.CONTROLLER_HOST)
            host.write_new(plan.folder / "slurmdbd.conf", text, mode=0o600)
        host.write_new(plan.conf, config.render_slurm_conf(plan))

    def _spawn(self, role: str, argv: list[str]) -> None:
        self.processes.append(host.spawn(role, argv, self.plan.output(role), self.plan.mark))
        host.save_state(self.plan, self.processes)

    def _wait(self, condition: Callable[[], bool], deadline: float, role: str, failure: str) -> None:
        """Wait until a condition holds; a daemon that ends meanwhile is named at once, with its last words."""

        def dead() -> list[str]:
            return [process.role for process in self.processes if not process.is_alive() and process.role != _STARTER]

        if host.wait_until(lambda: bool(dead()) or condition(), deadline) and not dead():
            return
        culprits = dead()
        why = f"{culprits[0]} ended at once" if culprits else f"{failure} in time"
        log = self.plan.output(culprits[0] if culprits else role)
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        words = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise RunError(f"the box did not start: {why}; the last line of {log}: {words}")

    def _nodes_are_idle(self) -> bool:
        try:
            states = self.node_states()
        except RunError:
            return False
        return len(states) == self.plan.num_nodes and set(states.values()) == {"idle"}

    def _cancel_jobs(self) -> None:
        """Give running jobs a chance to end and to be recorded as cancelled; never an error."""
        controller = [process for process in self.processes if process.role == "slurmctld" and process.is_alive()]
        if not controller or not self.is_alive():
            return
        queue = ["squeue", "--noheader", "--format=%i", "--states=PENDING,RUNNING,SUSPENDED,COMPLETING"]
        try:
            if host.call(queue, 5, self.environment).strip():
                for partition in self.plan.equipment.partition_names:
                    host.call(["scancel", f"--partition={partition}"], 5, self.environment)
                host.wait_until(
                    lambda: not host.call(queue, 5, self.environment).strip(), time.monotonic() + 5, pause_s=0.2
                )
        except DlbenchError:
            return


def _refuse_lacks(lacks: list[str]) -> None:
    if lacks:
        raise EnvironmentLacksError(f"no box can run here: {'; '.join(lacks)}")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
