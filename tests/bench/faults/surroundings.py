"""What surrounds a run: the working directory, variables, the host's name, shared memory, the disk, limits."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.bench.faults.catalogue import Fault
from tests.bench.faults.processes import require_nothing_left
from tests.bench.faults.workshop import (
    REGRESSION,
    RUN_S,
    CannotPlantError,
    DidNotHoldError,
    Done,
    Workshop,
    await_that,
    finish,
    short,
)
from tests.support.leftovers import Leftovers

NAMES = ("profile", "platform", "statistics", "pynvml", "torch", "json")
"""Modules that a rank, a library or the sampler imports."""


def faults() -> Iterator[Fault]:
    """Everything of this family."""
    for module in NAMES:
        name = f"a {module}.py in the working directory"
        yield Fault(family="surroundings", name=name, replay=partial(_foreign_module, name, module))
    for kind in _PYTHONS:
        name = f"system.python is {kind}"
        yield Fault(family="surroundings", name=name, replay=partial(_python, name, kind))
    for engine in ("ddp", "horovod"):
        name = f"{engine}: the host name does not resolve"
        yield Fault(family="surroundings", name=name, replay=partial(_host_name, name, engine))
        name = f"{engine}: a variable that is not UTF-8"
        yield Fault(family="surroundings", name=name, replay=partial(_odd_variable, name, engine))
    yield Fault(family="surroundings", name="/dev/shm of 256 KiB and a loader", replay=_small_shared_memory)
    for rank in (0, 1):
        name = f"a bad image met by rank {rank}"
        yield Fault(family="surroundings", name=name, replay=partial(_bad_image, name, rank))
    yield Fault(family="surroundings", name="the disk fills in mid-run", replay=_full_disk)
    yield Fault(family="surroundings", name="the run's folder is removed in mid-run", replay=_removed_folder)
    yield Fault(family="surroundings", name="the run's folder is replaced by a link in mid-run", replay=_linked_folder)
    yield Fault(family="surroundings", name="report -o on a full disk", replay=_full_output)
    yield Fault(family="surroundings", name="report under ulimit -v", replay=_address_space)
    for blocks in (0, 1, 8):
        name = f"run under ulimit -f {blocks}"
        yield Fault(family="surroundings", name=name, replay=partial(_file_size, name, blocks))
    for end in ("md", "html", "json"):
        name = f"report -o x.{end} under ulimit -f 1"
        yield Fault(family="surroundings", name=name, replay=partial(_file_size_of_report, name, end))
    for words in _SETTINGS:
        name = f"run {' '.join(words)!a:.60}"
        yield Fault(family="surroundings", name=name, replay=partial(_refused, words))
    for name, replay in _LAUNCHERS.items():
        yield Fault(family="surroundings", name=name, replay=partial(replay, name))


def _train(
    shop: Workshop,
    out: Path,
    *more: str,
    engine: str = "ddp",
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    wrapped: Sequence[str] = (),
) -> Done:
    words = (
        "run",
        "bert",
        "--preset",
        "ci",
        "--engine",
        engine,
        "--ranks",
        "2",
        "--data",
        "synthetic",
        "--no-progress",
    )
    with Leftovers({**shop.environment, **(variables or {})}) as leftovers:
        given = {**leftovers.environment, **(variables or {})}
        done = shop.call(
            *words, *short(2), *more, "--out", out, limit_s=RUN_S, cwd=cwd, variables=given, wrapped=wrapped
        )
        require_nothing_left(leftovers)
    return done


def _foreign_module(name: str, module: str, shop: Workshop) -> None:
    folder = shop.folder(name)
    canary = folder / "canary"
    (folder / f"{module}.py").write_text(f"open({str(canary)!r}, 'w').close()\n", encoding="utf-8")
    # As a shell starts it: a console script has its own folder on the path, not the working directory.
    done = _train(shop, folder / "runs", cwd=folder)
    if canary.exists():
        raise DidNotHoldError(f"{module}.py of the working directory was executed")
    done.require((0,))


_PYTHONS: dict[str, Callable[[Path], Path | str]] = {
    "a file that is no program": lambda folder: "/etc/passwd",
    "a folder": lambda folder: folder,
    "an empty executable": lambda folder: _executable(folder / "empty", ""),
    "nowhere": lambda folder: folder / "nowhere",
    "a Python without dlbench": lambda folder: _executable(
        folder / "bare", '#!/bin/sh\nunset PYTHONPATH\nexec python3 -I -S "$@"\n'
    ),
}


def _executable(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    path.chmod(0o755)
    return path


def _python(name: str, kind: str, shop: Workshop) -> None:
    folder = shop.folder(name)
    done = _train(shop, folder / "runs", "--set", f"system.python={_PYTHONS[kind](folder)}")
    done.require((2, 3, 5))
    if kind != "a Python without dlbench" and list(folder.glob("runs/*/plan.json")):
        raise DidNotHoldError("a run that could not be started stays, as one that was not")


def _host_name(name: str, engine: str, shop: Workshop) -> None:
    _require_namespaces("-u")
    wrapped = ("unshare", "-u", "sh", "-c", 'hostname foo.invalid && "$@"', "sh")
    done = _train(shop, shop.folder(name) / "runs", engine=engine, wrapped=wrapped)
    if done.code != 0:
        done.require((5,), "foo.invalid", "resolve")


def _odd_variable(name: str, engine: str, shop: Workshop) -> None:
    wrapped = ("sh", "-c", 'OMP_WEIRD=$(printf "\\377") "$@"', "sh")
    _train(shop, shop.folder(name) / "runs", engine=engine, wrapped=wrapped).require((0,))


def _small_shared_memory(shop: Workshop) -> None:
    _require_namespaces("-m")
    wrapped = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=256k none /dev/shm && "$@"', "sh")
    words = ("run", *shop.training("ddp"), *short(2), "--set", "measure.stall_timeout_s=600")
    out = shop.folder("shared-memory") / "runs"
    shop.call(*words, "--out", out, wrapped=wrapped, limit_s=RUN_S).require((3, 5), "/dev/shm")


def _bad_image(name: str, rank: int, shop: Workshop) -> None:
    folder = shop.folder(name)
    images = folder / "images"
    shutil.copytree(shop.images, images)
    files = sorted(images.rglob("train/**/*.jpg")) or sorted(images.rglob("*.jp*g"))
    # Every second file, so that with an order of every kind the chosen rank meets one early, too.
    for path in files[rank::2]:
        path.write_bytes(b"no image")
    words = ["run", *shop.training("ddp", loaders=0), *short(8), "--repeats", "2", "--out", str(folder / "runs")]
    words[words.index(str(shop.images))] = str(images)
    shop.call(*words, limit_s=RUN_S).require((2,), ".jp", "0 of 2 runs valid")


def _full_disk(shop: Workshop) -> None:
    _require_namespaces("-m")
    folder = shop.folder("disk")
    out = folder / "runs"
    out.mkdir()
    until = f"while [ ! -e {out}/*/node-0000.status.json ]; do sleep 0.1; done; sleep 3"
    fill = f"({until}; cat /dev/zero > {out}/fill) 2>/dev/null &"
    mount = f"mount -t tmpfs -o size=2m none {out}"
    script = f'{mount} && {{ {fill} }} && "$@"; code=$?; cp -r {out}/*/ {folder}/kept; exit $code'
    done = shop.call(
        *("run", *shop.training("ddp"), *short(20_000), "--out", str(out)),
        wrapped=("unshare", "-m", "sh", "-c", script, "sh"),
        limit_s=RUN_S,
    )
    done.require((5,), "No space left on device", "rank ", "0 of 1 runs valid")
    shop.call("status", folder).require((3, 4))


def _removed_folder(shop: Workshop) -> None:
    out = shop.folder("removed") / "runs"
    process = shop.start("run", *shop.training("ddp"), *short(100), "--repeats", "2", "--out", out)
    await_that(lambda: len(list(out.glob("*/node-*.steps"))) == 1, RUN_S, "the measured steps")
    for path in out.iterdir():
        shutil.rmtree(path, ignore_errors=True)
    done = finish(process, ["run"], RUN_S)
    done.require((3, 4), "1 of 2 runs valid")


def _linked_folder(shop: Workshop) -> None:
    folder = shop.folder("linked")
    out, victim = folder / "runs", folder / "victim"
    victim.mkdir()
    process = shop.start("run", *shop.training("ddp"), *short(100_000), "--out", out)
    await_that(lambda: len(list(out.glob("*/node-*.steps"))) == 1, 90, "the measured steps")
    (run,) = (path.parent for path in out.glob("*/plan.json"))
    shutil.copy(run / "plan.json", victim)  # as if it were a run
    run.rename(folder / "moved")
    run.symlink_to(victim)
    finish(process, ["run"], 240).require((3,), "was replaced by a link while the run went on")
    if [path.name for path in victim.iterdir()] != ["plan.json"]:
        raise DidNotHoldError(f"wrote into the folder that the link leads to: {sorted(victim.iterdir())}")


def _full_output(shop: Workshop) -> None:
    _require_namespaces("-m")
    place = shop.folder("full output")
    script = f'mount -t tmpfs -o size=64k none {place} && cat /dev/zero > {place}/fill 2>/dev/null; "$@"'
    for name in ("x.md", "x.csv", "x.json"):
        words = ("report", str(shop.finished), "-o", str(place / name))
        shop.call(*words, wrapped=("unshare", "-m", "sh", "-c", script, "sh")).require((5,), "No space left on device")


def _address_space(shop: Workshop) -> None:
    page = shop.folder("limit") / "page.html"
    done = shop.shell('ulimit -v 64000000; "$@"', "report", shop.finished, "-o", page)
    done.require((0, 5))
    if done.code == 0 and not page.exists():
        raise DidNotHoldError("no page, and no word of it")
    if done.code == 5:
        done.require((5,), "ulimit")


def _file_size(name: str, blocks: int, shop: Workshop) -> None:
    """`blocks` of 512 bytes (POSIX, ulimit -f) are all that any file may have."""
    out = shop.folder(name) / "runs"
    with Leftovers(shop.environment) as leftovers:
        words = ("run", *shop.training("ddp"), *short(20_000), "--out", out)
        process = shop.start(
            *words, variables=leftovers.environment, wrapped=("sh", "-c", f'ulimit -f {blocks}; "$@"', "sh")
        )
        done = finish(process, words, RUN_S)
        require_nothing_left(leftovers)
    done.require((2, 3, 5), "File too large")
    shop.call("status", out).require((0, 2, 3, 4))


def _file_size_of_report(name: str, end: str, shop: Workshop) -> None:
    page = shop.folder(name) / f"x.{end}"
    done = shop.shell('ulimit -f 1; "$@"', "report", shop.finished, "-o", page)
    done.require((2, 5), page.name, "File too large")
    if list(page.parent.iterdir()):
        raise DidNotHoldError("a part of the report is left")


_SETTINGS: Sequence[Sequence[str]] = (
    ("--ab", "plain", "train.seed=.inf"),
    ("--sweep", "train.seed=.inf,1"),
    ("--sweep", "train.seed=1e999,.nan"),
    ("--set", "train.seed=.inf"),
    ("--repeats", "99999999"),
    ("--ranks", "999999999"),
    ("--set", "train.batch_per_rank=" + "9" * 5000),
    ("--set", "x" * 100_000 + "=1"),
    ("--resume", "ev\x1b]0;pwn\a/ck.safetensors"),
    ("--out", "ev\x1b]0;pwn\a"),
    ("--tag", "a=\u202egnp"),
    ("--set", "system.name=\x1b[31mred"),
)


def _refused(words: Sequence[str], shop: Workshop) -> None:
    begin = ("run", "bert", "--preset", "ci", "--dry-run", "--data", "synthetic")
    done = shop.call(*begin, *words)
    done.require((0, 2, 4))
    if len(done.errors) > 4000:
        raise DidNotHoldError(f"an error of {len(done.errors)} characters")


def _mpirun_as_root(name: str, shop: Workshop) -> None:
    if os.getuid() != 0 or shutil.which("mpirun") is None:
        raise CannotPlantError("needs root and Open MPI")
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": ""}
    done = _train(shop, shop.folder(name) / "runs", "--launcher", "mpirun", engine="horovod", variables=variables)
    if done.code != 0:
        done.require((3, 5), "root")


def _srun_without_slurm(name: str, shop: Workshop) -> None:
    if shutil.which("srun") is None:
        raise CannotPlantError("needs Slurm's programs")
    done = _train(shop, shop.folder(name) / "runs", "--launcher", "srun-gloo")
    done.require((2, 3, 5), "srun")


def _sigpipe_ignored(name: str, shop: Workshop) -> None:
    wrapped = ("sh", "-c", "trap '' PIPE; \"$@\"", "sh")
    _train(shop, shop.folder(name) / "runs", wrapped=wrapped).require((0,))


def _few_files(name: str, shop: Workshop) -> None:
    done = _train(shop, shop.folder(name) / "runs", wrapped=("sh", "-c", 'ulimit -n 24; "$@"', "sh"))
    if done.code == REGRESSION or "Traceback" in done.errors:
        raise DidNotHoldError(done.text[-200:])


def _temporary_folder_full(name: str, shop: Workshop) -> None:
    variables = {"TMPDIR": "/nonexistent-folder"}
    _train(shop, shop.folder(name) / "runs", variables=variables).require((0, 2, 3, 5))


_LAUNCHERS: dict[str, Callable[[str, Workshop], None]] = {
    "mpirun as root": _mpirun_as_root,
    "srun without Slurm": _srun_without_slurm,
    "SIGPIPE ignored": _sigpipe_ignored,
    "24 open files at most": _few_files,
    "TMPDIR names no folder": _temporary_folder_full,
}


def _require_namespaces(kind: str) -> None:
    done = subprocess.run(["unshare", kind, "true"], capture_output=True, check=False)
    if done.returncode != 0:
        raise CannotPlantError(f"unshare {kind} is not allowed here")
