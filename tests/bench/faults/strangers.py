"""What other users of the machine may do while a run trains, and what they may prepare for root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path

import psutil

from dlbench.jobs.box.config import BoxPlan
from dlbench.jobs.box.host import Process, save_state, start_ticks
from tests.bench.faults.catalogue import Fault
from tests.bench.faults.processes import ENGINES, await_ranks, end_by_force, train
from tests.bench.faults.workshop import NOBODY, RUN_S, CannotPlantError, DidNotHoldError, Workshop, await_that, short
from tests.support.leftovers import Leftovers

SECRET = "correct-horse-battery"


def faults() -> Iterator[Fault]:
    """Everything of this family."""
    for engine in ENGINES:
        name = f"{engine}: who may connect"
        yield Fault(family="strangers", name=name, replay=partial(_listeners, name, engine))
    yield Fault(family="strangers", name="comm: who may connect", replay=_comm_listeners)
    for name, plant in _BOXES.items():
        yield Fault(family="strangers", name=name, replay=partial(plant, name))
    for variable in ("UCX_AUTH", "OMPI_MCA_x_bearer", "OMPI_MCA_btl_pw", "WANDB_API_KEY", "MY_TOKEN"):
        name = f"{variable} in the environment"
        yield Fault(family="strangers", name=name, replay=partial(_secret_variable, name, variable, SECRET))
    name = "a URL with a password in the environment"
    yield Fault(
        family="strangers",
        name=name,
        replay=partial(_secret_variable, name, "GLOO_URL", f"http://user:{SECRET}@host/"),
    )
    for launcher in ("local", "mpirun"):
        name = f"a token in launch.environment, {launcher}"
        yield Fault(family="strangers", name=name, replay=partial(_secret_in_system, name, launcher))


def _listeners(name: str, engine: str, shop: Workshop) -> None:
    out = shop.folder(name) / "runs"
    with Leftovers(shop.environment) as leftovers:
        process = train(shop, engine, out, leftovers)
        try:
            await_ranks(process, out)
            _require_loopback(process)
        finally:
            end_by_force(process)


def _comm_listeners(shop: Workshop) -> None:
    out = shop.folder("comm-listeners") / "runs"
    process = shop.start("comm", "run", "--ranks", "2", "--sizes", "1KiB:64MiB:40", "--out", out)
    try:
        await_that(lambda: any(out.glob("*/node-0000.status.json")) or process.poll() is not None, 60, "ranks")
        seen = False
        for _ in range(40):
            if process.poll() is not None:
                break
            seen = _require_loopback(process) or seen
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.25)
        if not seen:
            raise CannotPlantError("no listener was seen")
    finally:
        end_by_force(process)


def _require_loopback(process: subprocess.Popen[bytes]) -> bool:
    """Whether any socket listens at all."""
    seen = False
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            if one.name() == "mpirun":
                continue  # Open MPI's own runtime listens everywhere, whatever it is told
            for connection in one.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    seen = True
                    address = connection.laddr.ip
                    if not address.startswith("127.") and address != "::1":
                        raise DidNotHoldError(f"{one.name()} listens on {address}:{connection.laddr.port}")
    return seen


def _require_root() -> None:
    if os.getuid() != 0:
        raise CannotPlantError("only root starts a box")
    if shutil.which("slurmctld") is None:
        raise CannotPlantError("needs Slurm")


def _box_state(name: str, shop: Workshop) -> None:
    """A state file of another user names a process of root's."""
    _require_root()
    folder = shop.folder(name)
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
    try:
        box = folder / "box"
        box.mkdir()
        plan = BoxPlan(
            folder=box,
            token="evil",
            num_nodes=1,
            cpus_per_node=1,
            memory_mb=100,
            subnet=IPv4Network("10.99.0.0/24"),
            controller_port=6817,
            login_name="login",
        )
        ticks = start_ticks(victim.pid)
        assert ticks is not None
        save_state(plan, [Process("slurmctld", victim.pid, ticks)])
        for path in (box, box / "box.json"):
            os.chown(path, NOBODY, NOBODY)
        shop.call("box", "stop", box).require((2, 4, 5))
        if victim.poll() is not None:
            raise DidNotHoldError("box stop ended a process that another user named")
    finally:
        victim.kill()
        victim.wait()


def _box_folder(mode: int, owner: int, name: str, shop: Workshop) -> None:
    _require_root()
    box = shop.folder(name) / "box"
    box.mkdir()
    box.chmod(mode)
    os.chown(box, owner, owner)
    done = shop.call("box", "start", box, "--nodes", "1")
    if done.code == 0:
        shop.call("box", "stop", box)
    done.require((2, 5), "box")


_BOXES: dict[str, Callable[[str, Workshop], None]] = {
    "box stop: a state file of another user": _box_state,
    "box start: a folder of another user": partial(_box_folder, 0o755, NOBODY),
    "box start: a folder that all may write": partial(_box_folder, 0o777, 0),
}


def _secret_variable(name: str, variable: str, value: str, shop: Workshop) -> None:
    out = shop.folder(name) / "runs"
    words = ("run", "bert", "--preset", "ci", "--engine", "single", "--data", "synthetic", *short(2), "--out", str(out))
    shop.call(*words, variables={variable: value}, limit_s=RUN_S).require((0,))
    _require_absent(out, SECRET)


def _secret_in_system(name: str, launcher: str, shop: Workshop) -> None:
    """A secret by reference reaches the ranks and is nowhere else; as a literal it is refused."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        raise CannotPlantError("needs Open MPI")
    folder = shop.folder(name)
    words = ("run", *shop.training("horovod"), *short(100_000), "--launcher", launcher, "--out", str(folder / "runs"))
    literal = ("--set", f"system.launch.environment.SITE_TOKEN={SECRET}")
    shop.call(*words, *literal, "--dry-run").require((2,), "SITE_TOKEN")
    reference = ("--set", "system.launch.environment.SITE_TOKEN.variable=THE_TOKEN")
    process = shop.start(*words, *reference, variables={"THE_TOKEN": SECRET})
    try:
        found = await_ranks(process, folder / "runs")
        for one in [one for group in found.values() for one in group]:
            if any(SECRET in word for word in one.cmdline()):
                raise DidNotHoldError(f"the secret stands on the command line of {one.name()}")
        if any(one.environ().get("SITE_TOKEN") != SECRET for one in found["rank"]):
            raise DidNotHoldError("the ranks did not get the value")
    finally:
        end_by_force(process)
    _require_absent(folder / "runs", SECRET)


def _require_absent(folder: Path, text: str) -> None:
    holders = [path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
    if holders:
        raise DidNotHoldError(f"the secret stands in {', '.join(holders)}")
