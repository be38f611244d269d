"""Paths that cannot be: below a folder that may not be entered, too long, no file at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.bench.faults.catalogue import Fault
from tests.bench.faults.files import give_away
from tests.bench.faults.workshop import WITHOUT_RIGHTS, Workshop

Words = Callable[[Path, Workshop], Sequence[str | Path]]

PLAN = ("run", "bert", "--preset", "ci", "--engine", "ddp", "--ranks", "2")

COMMANDS: dict[str, Words] = {
    "status": lambda path, shop: ("status", path),
    "report": lambda path, shop: ("report", path),
    "report -o": lambda path, shop: ("report", shop.finished, "-o", path / "report.html"),
    "diagnose": lambda path, shop: ("diagnose", path),
    "compare": lambda path, shop: ("compare", shop.finished, path),
    "baseline": lambda path, shop: ("baseline", path, "-o", shop.root / "baseline.json"),
    "trace": lambda path, shop: ("trace", path, "-o", shop.root / "trace.json"),
    "check --baseline": lambda path, shop: ("check", "--candidate", shop.finished, "--baseline", path),
    "comm report": lambda path, shop: ("comm", "report", path),
    "comm fit": lambda path, shop: ("comm", "fit", path),
    "comm predict": lambda path, shop: ("comm", "predict", path, "--ranks", "4"),
    "export mllog": lambda path, shop: ("export", "mllog", path),
    "data verify": lambda path, shop: ("data", "verify", path),
    "history import": lambda path, shop: ("history", "import", path, "--store", shop.root / "store"),
    "history list": lambda path, shop: ("history", "list", "--store", path),
    "run --data": lambda path, shop: (*PLAN, "--dry-run", "--data", path),
    "run --resume": lambda path, shop: (*PLAN, "--dry-run", "--data", "synthetic", "--resume", path),
    "run --system": lambda path, shop: (*PLAN, "--dry-run", "--data", "synthetic", "--system", path),
    "run --out": lambda path, shop: (*PLAN, "--data", "synthetic", "--out", path),
    "run FILE": lambda path, shop: ("run", f"{path}.yaml", "--dry-run"),
    "show FILE": lambda path, shop: ("show", f"{path}.yaml"),
}

NAMED = list(range(2, 6))
LONG = "n" * 300


def faults() -> Iterator[Fault]:
    """Everything of this family."""
    for command in COMMANDS:
        name = f"{command}: below a folder that may not be entered"
        yield Fault(family="paths", name=name, replay=partial(_closed, name, command))
        yield Fault(family="paths", name=f"{command}: a name of 300 bytes", replay=partial(_given, command, Path(LONG)))
        yield Fault(family="paths", name=f"{command}: /dev/null", replay=partial(_given, command, Path("/dev/null")))
        name = f"{command}: a line break"
        yield Fault(family="paths", name=name, replay=partial(_given, command, Path("o\n#SBATCH --wrap=touch")))
    yield Fault(family="paths", name="the working directory is gone", replay=_gone)


def _closed(name: str, command: str, shop: Workshop) -> None:
    folder = shop.folder(name)
    (folder / "private" / "runs").mkdir(parents=True)
    give_away(folder / "private")
    shop.call(*COMMANDS[command](folder / "private" / "runs", shop), wrapped=WITHOUT_RIGHTS).require(NAMED, "private")


def _given(command: str, path: Path, shop: Workshop) -> None:
    shop.call(*COMMANDS[command](path, shop)).require(NAMED)


def _gone(shop: Workshop) -> None:
    words = (*PLAN, "--data", "synthetic", "--out", "relative")
    script = 'mkdir gone && cd gone && rmdir ../gone && "$@"'
    shop.shell(script, *words).require(NAMED)
