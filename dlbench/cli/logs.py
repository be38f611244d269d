"""`dlbench logs`: what a run said."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from dlbench.cli.options import output_folder
from dlbench.errors import UserError
from dlbench.jobs.submission import read_submission
from dlbench.records.folder import RunFolder

if TYPE_CHECKING:
    from dlbench.records.folder import RunFolder


_JOB_LOG = re.compile(r"slurm-\d+(_\d+)?\.out")
_RANK_LOG = re.compile(r"rank-\d+\.log")


def logs_of(folder: RunFolder, rank: int | None = None) -> list[Path]:
    """The logs of a run that are there: of its job, of its launcher, and of its ranks.

    Args:
        folder: the run's.
        rank: the log of this rank alone.

    Raises:
        UserError: there is none (yet).
        IncompleteDataError: `submission.json` is damaged.
    """
    names = sorted(path.name for path in folder.path.iterdir())
    if rank is not None:
        if folder.log(rank).exists():
            return [folder.log(rank)]
        raise UserError(
            f"{folder.path}: has no {folder.log(rank).name}: "
            + (
                _told(name for name in names if _RANK_LOG.fullmatch(name))
                or "its ranks write into one log, see without"
            )
        )
    submission = read_submission(folder)
    job_log = [] if submission is None else [folder.path.parent / submission.log]
    own = [folder.path / name for name in names if _JOB_LOG.fullmatch(name)]
    ranks = [folder.path / name for name in names if _RANK_LOG.fullmatch(name)]
    found = [path for path in dict.fromkeys([*job_log, *own, folder.launch_log, *ranks]) if path.is_file()]
    if not found:
        raise UserError(f"{folder.path}: has no log yet; see `dlbench status {folder.path}`")
    return found


def _told(names: Iterable[str]) -> str:
    there = list(names)
    return f"there are {there[0]} to {there[-1]}" if there else ""


_MAX_BYTES = 1 << 22
"""Of each log, its end."""

_LOOK_S = 1.0


@click.command()
@click.argument("run")
@output_folder()
@click.option("--rank", metavar="N", type=click.IntRange(min=0), help="The log of this rank alone.")
@click.option("--lines", metavar="N", type=click.IntRange(min=0), default=200, show_default=True, help="Of each log.")
@click.option("--follow", is_flag=True, help="Go on as it grows, until the run has ended.")
def logs(run: str, out: Path, rank: int | None, lines: int, follow: bool) -> None:
    """Print the last lines of what RUN said: of its Slurm job, of its launcher, of its ranks.

    RUN is the id of a run in --out, or its folder.

    \b
    Example:
      dlbench logs nightly-resnet50-ci-p00-n0001-k00 --follow
    """
    from dlbench.opening import open_inside

    folder = run_folder(run, out)
    paths = logs_of(folder, rank)
    sizes: dict[Path, int] = {}
    for path in paths:
        with open_inside(path) as file:
            sizes[path] = file.seek(0, os.SEEK_END)
            file.seek(max(0, sizes[path] - _MAX_BYTES))
            _print(path, file.read(_MAX_BYTES), lines, is_one=len(paths) == 1)
    if follow:
        _follow(folder, rank, sizes)


def run_folder(run: str, out: Path) -> RunFolder:
    """The folder of a run: its own path, or its name below the folder of all runs.

    Raises:
        UserError: there is none; names the runs of a series of that name.
    """
    from dlbench.records.folder import RunFolder

    # A folder that a person names may be a link to it.
    for path in (Path(os.path.realpath(run)), (out / run).absolute()):
        if RunFolder(path).plan.exists():
            return RunFolder(path)
    there = sorted(path.parent.name for path in out.glob(f"{_escaped(run)}-*/plan.json"))
    if there:
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        raise UserError(f"{run}: is a series; name one of its runs: {', '.join(there[:3])}{more}")
    raise UserError(f"{run}: no such run in {out}")


def _escaped(text: str) -> str:
    import glob

    return glob.escape(text) if text and "/" not in text and text not in (".", "..") else "*no run*"


def _print(path: Path, content: bytes, lines: int, *, is_one: bool) -> None:
    from dlbench.cli.streams import cleaned

    text = content.decode("utf-8", "replace")
    shown = text.splitlines()
    if not is_one:
        click.echo(cleaned(f"==> {path.parent.name}/{path.name} <=="))
    for line in shown[-lines:] if lines else shown:
        click.echo(cleaned(line))


def _follow(folder: RunFolder, rank: int | None, sizes: dict[Path, int]) -> None:
    """Prints what is added, until the run has a record, its launcher gave it up or its job is over, and nothing was
    added since.
    """
    from dlbench.cli.streams import cleaned
    from dlbench.jobs.campaign.completing import EVERY_S
    from dlbench.opening import open_inside

    last = next(reversed(sizes), None)
    is_over, asked = False, time.monotonic()
    while True:
        grew = False
        paths: list[Path] = []
        with suppress(UserError):  # a new attempt has put them aside
            paths = logs_of(folder, rank)
        for path in paths:
            added = b""
            with suppress(FileNotFoundError), open_inside(path) as file:
                if sizes.get(path, 0) > file.seek(0, os.SEEK_END):  # that of a new attempt
                    sizes[path] = 0
                file.seek(sizes.get(path, 0))
                added = _whole_lines(file, is_over=is_over)
            if not added:
                continue
            grew = True
            sizes[path] = sizes.get(path, 0) + len(added)
            if path != last:
                click.echo(cleaned(f"==> {path.parent.name}/{path.name} <=="))
                last = path
            click.echo(cleaned(added.decode("utf-8", "replace").removesuffix("\n")))
        if is_over and not grew:
            return
        is_over = is_over or any(path.exists() for path in (folder.record, folder.comm, folder.failure))
        if not is_over and time.monotonic() >= asked + EVERY_S:
            is_over, asked = _is_over(folder), time.monotonic()
        time.sleep(_LOOK_S)


def _whole_lines(file: IO[bytes], *, is_over: bool) -> bytes:
    added = file.read(_MAX_BYTES)
    return added if is_over or len(added) == _MAX_BYTES else added[: added.rfind(b"\n") + 1]


def _is_over(folder: RunFolder) -> bool:
    """Whether nothing is to come of a run, as where its job ended without a record."""
    from dlbench.jobs.campaign.outlook import outlooks
    from dlbench.records.collectives_scan import read_launched

    (one,), _ = outlooks([read_launched(folder.path)])
    return one.ahead == "nothing"
