"""What a box made, as a file in its folder: written before it is made, so that a later process can end exactly that.

`box.json` holds a format number, the plan and every process by pid and start time. After the end it
is called `box.stopped.json`: the mark of a folder that a new box may clear.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from dlbench.errors import UserError
from dlbench.jobs.box import trust
from dlbench.jobs.box.config import BoxPlan
from dlbench.jobs.box.equipment import Equipment
from dlbench.jobs.box.host import Process, boot_id

_FORMAT = "dlbench-box"
_VERSION = 1


def _running(folder: Path) -> Path:
    return folder / "box.json"


def _stopped(folder: Path) -> Path:
    return folder / "box.stopped.json"


def save(plan: BoxPlan, processes: Iterable[Process], first: bool = False) -> None:
    """Write the state in one piece; with `first`, only if no other process did so in the meantime.

    Raises:
        UserError: another box is being started in this folder.
    """
    state: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "boot_id": boot_id(),
        "plan": {**asdict(plan), "folder": str(plan.folder), "subnet": str(plan.subnet)},
        "processes": [asdict(process) for process in processes],
    }
    path = _running(plan.folder)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    trust.write_new(new, json.dumps(state, indent=2) + "\n")
    if not first:
        new.replace(path)
        return
    try:
        os.link(new, path)
    except FileExistsError:
        raise UserError(f"another process is starting a box in {plan.folder}") from None
    finally:
        new.unlink()


def load(folder: Path) -> tuple[BoxPlan, list[Process]]:
    """The plan and the processes of the box in a folder.

    Raises:
        UserError: there is none, its state is none that this version can read, or somebody else could have written it:
            then it is no evidence of what this box started.
    """
    path = _running(folder.absolute())
    trust.check_folder(path.parent)
    try:
        state = json.loads(trust.read_trusted(path))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no box runs in {folder}: `dlbench box start {folder}` starts one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as the state of a box: {error}") from None
    if not isinstance(state, dict) or state.get("format") != _FORMAT or state.get("version") != _VERSION:
        raise UserError(f"{path} is no state of a box in version {_VERSION}")
    try:
        # The file's own folder, not the one it names: what is ended must be what is looked at.
        plan = {**state["plan"], "folder": path.parent, "subnet": IPv4Network(state["plan"]["subnet"])}
        # JSON has lists only, and a plan that is compared with another has none.
        has: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in plan["equipment"].items()
        }
        plan["equipment"] = Equipment(**has)
        processes = [Process(**process) for process in state["processes"]]
        # After a reboot the same numbers mean other processes.
        return BoxPlan(**plan), processes if state["boot_id"] == boot_id() else []
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no state of a box: {error!r}") from None


def is_present(folder: Path) -> bool:
    """Whether a box was started here and not stopped; its processes may be dead all the same."""
    return _running(folder).exists()


def mark_stopped(folder: Path) -> None:
    """Say that all is gone."""
    _running(folder).replace(_stopped(folder))


def is_stopped(folder: Path) -> bool:
    """Whether the last box here was stopped as it should be."""
    return _stopped(folder).exists() and not is_present(folder)


def _is_strange(entry: Path) -> bool:
    """Whether it is anything but a state that a killed process had not yet given its name."""
    return not re.fullmatch(r"\.box\.json\.\d+", entry.name)


def clear(folder: Path) -> None:
    """Make the folder, or remove what a stopped box left in it.

    Raises:
        UserError: it cannot be made, it holds files that are no box's, or others can write in it.
    """
    trust.check_folder(folder)
    try:
        trust.make_folder(folder)
        trust.check_entries(folder)
        is_strange = any(map(_is_strange, folder.iterdir())) and not is_stopped(folder)
    except OSError as error:
        raise UserError(f"a box cannot be kept in {folder}: {error.strerror}") from None
    if is_strange:
        raise UserError(f"{folder} holds files that are no box's: name a new or an empty folder")
    for pattern in ("db", "dev", "log", "munge", "state", "spool.n*", "sys.n*", "tmp.n*"):
        for old in folder.glob(pattern):
            shutil.rmtree(old)
    for entry in folder.iterdir():
        if not _is_strange(entry):
            entry.unlink()
    # Job numbers begin anew, so that an old line would be taken for a new job's; the others a new box may not have.
    for name in ("jobcomp.txt", "gres.conf", "topology.conf", "slurmdbd.conf"):
        (folder / name).unlink(missing_ok=True)
