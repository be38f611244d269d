"""A data set of noise for tests of the engine; imports little, because worker processes import it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.datasets.making.production import DatasetPart, produce
from dlbench.errors import EnvironmentLacksError, UserError

__all__ = ["Noise", "produce"]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Files of random bytes; every third part is a folder of two files."""

    num_train: int = 9
    num_validation: int = 3
    num_bytes: int = 5000
    seed: int = 0
    delay_s: float = 0.0
    """Not in `made_with`: it decides no byte."""
    last_s: float = 0.0
    """As long takes the last part, for whoever is to be ended before."""
    fail: str = ""
    fail_at: str = "train/noise-004"
    kind: str = "noise"

    @property
    def made_with(self) -> Mapping[str, str | int | float | bool]:
        return {"seed": self.seed, "num_bytes": self.num_bytes, "train": self.num_train, "share": 0.5, "odd": False}

    def parts(self) -> Sequence[DatasetPart]:
        return [DatasetPart(f"train/noise-{i:03d}", "train", 10 * i, 10) for i in range(self.num_train)] + [
            DatasetPart(f"validation/noise-{i:03d}", "validation", 7 * i, 7) for i in range(self.num_validation)
        ]

    def write(self, part: DatasetPart, path: Path) -> None:
        assert not path.exists()
        assert path.name == Path(part.name).name
        generator = random.Random(f"{self.seed} {part.name}")
        if self.fail and part.name == self.fail_at:
            self._fail(path)
        if part.first % 3:
            path.write_bytes(generator.randbytes(self.num_bytes))
        else:
            (path / "inner").mkdir(parents=True)
            (path / "a.bin").write_bytes(generator.randbytes(self.num_bytes))
            (path / "inner" / "b.bin").write_bytes(generator.randbytes(10))
        time.sleep(self.last_s if part.name == self.parts()[-1].name and self.last_s else self.delay_s)

    def _fail(self, path: Path) -> None:
        path.write_bytes(b"half")
        if self.fail == "user":
            raise UserError("source.jpg is no JPEG")
        if self.fail == "lacks":
            raise EnvironmentLacksError("h5py is not installed; pip install it")
        if self.fail == "disk":
            raise OSError(28, "No space left on device", str(path))
        if self.fail == "source":
            raise OSError(5, "Input/output error", "/mnt/source.txt")
        if self.fail == "defect":
            raise ZeroDivisionError("division by zero")
        os.kill(os.getpid(), signal.SIGKILL)

    def finish(self, folder: Path) -> None:
        (folder / "LICENSE").write_text("free\n", encoding="utf-8")
