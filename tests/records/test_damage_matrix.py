"""Every format that dlbench reads, spoiled in every way: one clear line with the file's name, and never another number.

A case copies a small tree, spoils one file of it, and calls the command that reads it. What is told must name the file,
have no traceback, and end with 2 (a file that the user named) or 4 (what was recorded); or all that is printed is as
before, because the damage changes nothing that is read.
"""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner

from dlbench.cli import cli
from dlbench.cli.streams import ending_of
from dlbench.datasets.making.catalogue import DatasetRequest, packing, plan_build
from dlbench.datasets.making.production import produce
from dlbench.errors import DlbenchError, ExitCode
from dlbench.history.history import Acknowledgement, acknowledge
from dlbench.node.training.checkpoint import Checkpoint
from dlbench.records.rows.spans import STAGE
from tests.support.collectives_factory import network
from tests.support.datasets import write_manifest
from tests.support.datasets import write_samples as write_bert_samples
from tests.support.history_factory import write_history
from tests.support.paths import DATA, ROOT
from tests.support.run_factory import Story, constant, exchange_result, plans, write_run
from tests.support.watch_factory import write_samples, write_spans

for package in ("h5py", "PIL", "pyarrow", "tokenizers", "google_crc32c"):
    pytest.importorskip(package)

LIMIT_S = 20
OSU = "# OSU MPI Allreduce Latency Test v7.3\n# Size       Avg Latency(us)\n4096 12.5\n65536 40.1\n1048576 300.5\n"
NCCL = """# nThread 1 nGpus 1 minBytes 1024 maxBytes 4194304 step: 4(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid   4000 on   node0000 device  0 [0x18] NVIDIA A100
#  Rank  1 Group  0 Pid   4001 on   node0001 device  0 [0x18] NVIDIA A100
$ mpirun -np 2 ./build/all_reduce_perf -b 1K -e 4M -f 4
#       size         count    type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256   float     sum      -1    20.10    0.05    0.05      0    20.00    0.05    0.05      0
      262144         65536   float     sum      -1    45.30    5.79    5.79      0    45.00    5.83    5.83      0
     4194304       1048576   float     sum      -1   420.40    9.98    9.98      0   419.00   10.01   10.01      0
"""


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    """A command that waits for a pipe, or reads without end, is interrupted."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError("waited for something that does not come")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def call(words: Sequence[str], root: Path) -> tuple[int, str]:
    """Exit code, and all that the command says."""
    arguments = [word.replace("ROOT", str(root)) for word in words]
    if arguments[0] == "checkpoint":
        try:
            read = Checkpoint(Path(arguments[1]))
        except DlbenchError as error:
            return int(error.exit_code), str(error)
        return 0, repr(read.progress)
    done = CliRunner().invoke(cli, arguments, env={"DLBENCH_HISTORY": None, "DLBENCH_PATH": None})
    error = done.exception
    ending = ending_of(error or SystemExit(0))
    assert ending.code != ExitCode.DEFECT, "".join(traceback.format_exception(error))
    return int(ending.code), f"{done.output}{error or ''}"


# What is read, and by which command


def write_runs(root: Path) -> None:
    gradients = [(9000, 0.01), (9000, 0.02)]
    for plan in plans(points=(2,), repeats=2):
        result = exchange_result(plan, gradients=gradients, alpha_s=1e-4, beta_s_per_byte=1e-9)
        folder = write_run(root / "runs", plan, constant([5, 0, 30, 50, 0, 10]), Story(exchange=result))
        for rank in range(2):
            write_spans(folder, rank, [{"lane": STAGE, "name": "building", "start_ns": 0, "end_ns": 10**9}])
        write_samples(folder, 0, ["host.energy.package-0_j"], [(n * 10**7, 1.0 * n) for n in range(300)])


def write_ended(root: Path) -> None:
    for name in ("v1/failed-*", "v1/submitted-*"):
        (source,) = (DATA / "formats").glob(name)
        shutil.copytree(source, root / "runs" / source.name)


def write_comm(root: Path) -> None:
    shutil.copytree(DATA / "formats" / "comm" / "v1", root / "runs")
    (root / "network.json").write_text(network().model_dump_json(), encoding="utf-8")
    (root / "osu.txt").write_text(OSU, encoding="utf-8")
    (root / "nccl.txt").write_text(NCCL, encoding="utf-8")


def write_store(root: Path) -> None:
    write_runs(root)
    history = write_history(root / "store", [(float(day), 1.0) for day in range(3)])
    history.entries()
    history.store.path.joinpath("odd").mkdir()
    series = {"group": "0123456789ab", "ranks": 2, "nodes": 1, "metric": "step_median_s"}
    moment = {"time": "2027-01-01T00:00:00Z", "through": "2027-01-01T00:00:00Z", "written": "2027-01-02T00:00:00Z"}
    acknowledge(history.store, Acknowledgement(**series, **moment, level=0.1, ratio=1.1, reason="driver", by="me"))
    for name in ("archive.tar", "archive.tar.gz"):
        assert call(["history", "export", "--store", "ROOT/store", "-o", f"ROOT/{name}"], root)[0] == 0


def write_gate(root: Path) -> None:
    write_runs(root)
    assert call(["baseline", "ROOT/runs", "--allow-few", "-o", "ROOT/base.json"], root)[0] == 0
    for name, source in (("workload.yaml", "workloads/cosmoflow.yaml"), ("system.yaml", "systems/local.yaml")):
        shutil.copyfile(ROOT / source, root / name)
    shutil.copytree(DATA / "formats" / "checkpoint" / "v1", root / "checkpoints")


def write_sets(root: Path) -> None:
    requests = {
        "tree": ("images", DatasetRequest(samples=10, validation=10, size="32")),
        "hdf5": ("density", DatasetRequest(samples=2, validation=2, size="8")),
        "tfrecord": ("density", DatasetRequest(samples=2, validation=2, size="8", container="tfrecord")),
    }
    for name, (kind, request) in requests.items():
        produce(plan_build(kind, request).recipe, root / name)
    produce(packing(root / "tree", samples_per_shard=8, seed=0).recipe, root / "tar")
    for split in ("train", "validation"):
        (root / "samples" / split).mkdir(parents=True)
        for name in ("a.h5", "b.h5"):
            write_bert_samples(root / "samples" / split / name, 20)
        (root / "text" / split).mkdir(parents=True)
        lines = [f"A sentence of {split}, number {number}.\n" + "\n" * (number % 3 == 2) for number in range(60)]
        for name in ("a.txt", "b.txt"):
            (root / "text" / split / name).write_text("".join(lines), encoding="utf-8")
    for name in ("samples", "text"):
        write_manifest(root / name, kind="test", made_with={"seed": 1}, counts={"train": 20, "validation": 20})


TREES: dict[str, Callable[[Path], None]] = {
    "runs": write_runs,
    "ended": write_ended,
    "comm": write_comm,
    "store": write_store,
    "gate": write_gate,
    "sets": write_sets,
}


@dataclass(frozen=True)
class Format:
    """One kind of file: in which tree it lies, where (a pattern, of which the first is spoiled), and who reads it."""

    tree: str
    path: str
    command: str
    is_json: bool = False
    is_named: bool = False
    """Whether a person names it, or it is of a data set: links are followed, and its content may have no checksum."""


REPORT = "report ROOT/runs --format json"
STATUS = "status ROOT/runs"
VERIFY = "data verify --workers 1 ROOT/"

FORMATS = {
    "plan": Format("runs", "runs/*/plan.json", REPORT, is_json=True),
    "record": Format("runs", "runs/*/record.json", REPORT, is_json=True),
    "status": Format("runs", "runs/*/rank-0001.status.json", STATUS, is_json=True),
    "steps": Format("runs", "runs/*/node-0000.steps", REPORT),
    "spans": Format("runs", "runs/*/node-0000.spans", "history import ROOT/runs --store ROOT/new"),
    "samples": Format("runs", "runs/*/node-0000.samples", REPORT),
    "failure": Format("ended", "runs/*/failure.json", STATUS, is_json=True),
    "submission": Format("ended", "runs/*/submission.json", STATUS, is_json=True),
    "collectives": Format("comm", "runs/*/comm.json", "comm report ROOT/runs --format json", is_json=True),
    "network": Format("comm", "network.json", "comm predict ROOT/network.json --ranks 4", is_json=True, is_named=True),
    "osu": Format("comm", "osu.txt", "comm import ROOT/osu.txt --system s --ranks 2 -o ROOT/fit.json", is_named=True),
    "nccl": Format("comm", "nccl.txt", "comm import ROOT/nccl.txt --system s -o ROOT/fit.json", is_named=True),
    "run of a history": Format(
        "store", "store/runs/*/*/record.json", "history import ROOT/store --store ROOT/new", is_json=True
    ),
    "history": Format("store", "store/history.json", "history list --store ROOT/store", is_json=True),
    "index": Format("store", "store/index.*", "history list --store ROOT/store"),
    "acknowledgement": Format("store", "store/acknowledged/*.json", "history trends --store ROOT/store", is_json=True),
    "archive": Format("store", "archive.tar", "history import ROOT/archive.tar --store ROOT/new", is_named=True),
    "packed archive": Format(
        "store", "archive.tar.gz", "history import ROOT/archive.tar.gz --store ROOT/new", is_named=True
    ),
    "baseline": Format(
        "gate", "base.json", "check --baseline ROOT/base.json --candidate ROOT/runs", is_json=True, is_named=True
    ),
    "workload": Format("gate", "workload.yaml", "show ROOT/workload.yaml", is_named=True),
    "system": Format("gate", "system.yaml", "show ROOT/system.yaml", is_named=True),
    "checkpoint": Format(
        "gate", "checkpoints/*", "checkpoint ROOT/checkpoints/step-00000003.safetensors", is_named=True
    ),
    "manifest": Format("sets", "tree/manifest.json", f"{VERIFY}tree", is_json=True, is_named=True),
    "list of files": Format("sets", "tree/manifest.files.jsonl", f"{VERIFY}tree", is_named=True),
    "image": Format("sets", "tree/train/*/*.jpg", f"{VERIFY}tree", is_named=True),
    "tar shard": Format("sets", "tar/train/*.tar", f"{VERIFY}tar", is_named=True),
    "index of shards": Format("sets", "tar/train/index.npz", f"{VERIFY}tar", is_named=True),
    "hdf5": Format("sets", "hdf5/train/*", f"{VERIFY}hdf5", is_named=True),
    "tfrecord": Format("sets", "tfrecord/train/*", f"{VERIFY}tfrecord", is_named=True),
    "samples of text": Format("sets", "samples/train/*", f"{VERIFY}samples", is_named=True),
    "text": Format("sets", "text/train/*", f"{VERIFY}text", is_named=True),
}


# How it is spoiled


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path: Path) -> None:
    """One byte of its middle; of JSON the quote of a key, since a number there has no checksum."""
    content = bytearray(path.read_bytes())
    at = content.index(b'"') if path.suffix.startswith(".json") else len(content) // 2
    content[at] ^= 0x10
    path.write_bytes(content)


def put(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def lead_out(path: Path) -> None:
    outside = path.parents[len(path.parents) - 5] / f"{path.parent.name}-outside"
    outside.mkdir(exist_ok=True)
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def enlarge(path: Path) -> None:
    """A terabyte by its size, none on the disk."""
    os.truncate(path, 1 << 40)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": put(b""),
    "cut": cut,
    "flipped": flip,
    "zeros at its end": lambda path: put(path.read_bytes() + bytes(4096))(path),
    "another kind": put(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8),
    "not UTF-8": lambda path: put(path.read_bytes()[:40] + b"\xff\xfe" + path.read_bytes()[40:])(path),
    "a link": lead_out,
    "a pipe": instead(os.mkfifo),
    "a folder": instead(Path.mkdir),
    "nested": put(b"[" * 100_000),
    "large": enlarge,
}

HARMLESS = {("archive", "zeros at its end"), ("packed archive", "zeros at its end")}
"""What changes nothing that is read, by format and damage."""
NO_DAMAGE = {
    ("spans", "cut"),
    ("samples", "cut"),  # A torn tail: the report counts fewer samples.
    ("archive", "a folder"),
    ("packed archive", "a folder"),
    ("workload", "cut"),
    ("workload", "flipped"),
    ("system", "cut"),
    ("system", "flipped"),
}
"""What is another whole file."""


@pytest.fixture(scope="module")
def tree_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        root = tmp_path_factory.mktemp(name)
        TREES[name](root)
        return root

    return made


@pytest.fixture(scope="module")
def said_of(
    tree_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[int, str]]:
    """What is said of a format that is whole."""

    @cache
    def said(name: str) -> tuple[int, str]:
        root = tmp_path_factory.mktemp("whole") / "tree"
        shutil.copytree(tree_of(FORMATS[name].tree), root)
        return said_in(root, FORMATS[name])

    return said


def said_in(root: Path, form: Format) -> tuple[int, str]:
    code, text = call(form.command.split(), root)
    return code, text.replace(str(root), "ROOT")


def cases() -> list[tuple[str, str]]:
    pairs = []
    for name, form in FORMATS.items():
        is_small = form.is_json or form.path.endswith((".yaml", ".txt"))
        pairs += [(name, damage) for damage in DAMAGES if damage != "large" or is_small]
    return [pair for pair in pairs if pair not in NO_DAMAGE]


@pytest.mark.parametrize(("name", "damage"), cases())
def test_damage_is_one_line_with_the_name_of_the_file(
    tree_of: Callable[[str], Path], said_of: Callable[[str], tuple[int, str]], tmp_path: Path, name: str, damage: str
) -> None:
    form = FORMATS[name]
    shutil.copytree(tree_of(form.tree), tmp_path / "tree", symlinks=True)
    path = sorted((tmp_path / "tree").glob(form.path))[0]
    DAMAGES[damage](path)
    code, text = said_in(tmp_path / "tree", form)
    assert "Traceback" not in text
    if (name, damage) in HARMLESS or (form.is_named and damage == "a link"):
        assert (code, text) == said_of(name)
    elif name == "index":
        assert (code, text.splitlines()[-4:]) == (0, said_of(name)[1].splitlines()[-4:])
    else:
        assert code in (2, 4), text
        # Of a data set also the folder that holds no file of its kind any more, and the manifest that names a list.
        names = [path.name, f"{path.parent.name}' holds no", "manifest.json"][: 3 if form.tree == "sets" else 1]
        assert [line for line in text.splitlines() if any(word in line for word in names)], text
