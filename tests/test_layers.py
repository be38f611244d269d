"""The house: who may import whom (docs/architecture.md), no circle, and what a login node must never load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from tests.support.paths import ROOT
from tests.support.run_factory import constant, plans, write_run

BASE = {"errors", "units", "bundled", "pool", "process_tree", "confidential", "opening", "final_status", "lazy"}
"""The base: every room may import it."""
NODE_FLOOR = BASE | {"specs", "datasets", "machine", "perfmodels", "records"}
READING = BASE | {"specs", "records", "stats", "analysis"}
PAGE = READING | {"report", "perfmodels"}

# Room -> rooms it may import (itself included implicitly). The table of docs/architecture.md.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors", "final_status"},
    "bundled": {"errors", "opening"},
    "pool": {"errors"},
    "confidential": set(),
    "process_tree": set(),
    "final_status": set(),
    "supervisor": {"process_tree", "final_status"},
    "opening": {"errors"},
    "lazy": set(),
    "stats": BASE,
    "specs": BASE,
    "machine": BASE,
    "setup": BASE | {"machine", "specs"},
    "datasets": BASE | {"specs"},
    "perfmodels": BASE | {"specs", "stats"},
    "records": BASE | {"specs"},
    "jobs": BASE | {"specs", "records", "machine"},
    "analysis": BASE | {"specs", "records", "stats"},
    "report": BASE | {"stats", "specs"},
    "perfetto": BASE | {"records"},
    "exports": READING,
    "history": READING | {"report"},
    "gate": READING | {"report"},
    "comm": PAGE,
    "projection": PAGE,
    "views": PAGE | {"history", "exports", "projection"},
    "cli": BASE
    | {"specs", "records", "datasets", "perfmodels", "setup", "jobs", "stats", "analysis", "report"}
    | {"views", "gate", "history", "comm", "perfetto", "exports", "projection"},
    "frames": BASE | {"records", "report", "perfetto", "views"},
    "node.models": NODE_FLOOR | {"node.part"},
    "node.devices": NODE_FLOOR | {"node.ranks"},
    "node.data": NODE_FLOOR
    | {"node.models", "node.ranks", "node.rendezvous", "node.page_locked", "node.failures"}
    | {"node.part"},
    "node.sync": NODE_FLOOR | {"node.ranks", "node.rendezvous", "node.failures", "node.devices"},
    "node.out_of_core": NODE_FLOOR
    | {"node.models", "node.data", "node.page_locked", "node.ranks", "node.failures", "node.sync", "node.part"},
    "node.training": NODE_FLOOR
    | {
        "node.models",
        "node.data",
        "node.out_of_core",
        "node.sync",
        "node.devices",
        "node.failures",
        "node.garbage",
        "node.watching",
        "node.ranks",
        "node.rendezvous",
        "node.page_locked",
        "node.part",
    },
    "node.watching": NODE_FLOOR | {"node.ranks", "node.rendezvous", "node.sync"},
    "node.comm": NODE_FLOOR
    | {"node.sync", "node.garbage", "node.ranks", "node.rendezvous", "node.failures"}
    | {"node.watching", "node.devices"},
    # The pieces of `dlbench.node` beside its rooms: the entry and what it needs before torch.
    "node.ranks": NODE_FLOOR,
    "node.part": NODE_FLOOR,
    "node.page_locked": NODE_FLOOR | {"node.ranks"},
    "node.garbage": set(),
    "node.failures": NODE_FLOOR | {"node.ranks"},
    "node.rendezvous": NODE_FLOOR | {"node.ranks"},
    "node.site_check": NODE_FLOOR | {"node.ranks", "node.rendezvous", "node.watching", "node.devices"},
    "node.__main__": NODE_FLOOR
    | {"node.ranks", "node.failures"}
    | {"node.sync", "node.watching", "node.training", "node.comm", "node.devices"},
    "node.out_of_core_profile": NODE_FLOOR
    | {"node.ranks", "node.failures", "node.models", "node.out_of_core", "node.training", "node.devices"},
    "__main__": {"cli"},
}


def room(module: str) -> str:
    """The room a module belongs to: `dlbench.node.data.images` -> `node.data`."""
    parts = module.split(".")[1:]
    if not parts:
        return ""
    return ".".join(parts[:2]) if parts[0] == "node" and len(parts) > 1 else parts[0]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("dlbench", cache_dir=None)


def test_every_import_is_allowed(graph: grimp.ImportGraph) -> None:
    wrong = []
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            here, there = room(module), room(imported)
            if here == there or not there:  # the package itself holds the version alone
                continue
            if there not in MAY_IMPORT.get(here, set()):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_every_room_is_in_the_table(graph: grimp.ImportGraph) -> None:
    rooms = {room(module) for module in graph.modules} - {"", "node"}
    assert rooms <= set(MAY_IMPORT)


def test_no_circles(graph: grimp.ImportGraph) -> None:
    circles = []
    for module in sorted(graph.modules):
        for imported in graph.find_modules_directly_imported_by(module):
            if graph.chain_exists(importer=imported, imported=module):
                circles.append(f"{module} <-> {imported}")
    assert circles == []


def folder_of(module: str, depth: int, packages: set[str]) -> str:
    """The folder of a module, cut at `depth` names; a module that lies no deeper stands for itself."""
    parts = module.split(".")
    if len(parts) > depth or module in packages:
        return ".".join(parts[:depth])
    return module


def folder_circles(imports: set[tuple[str, str]], packages: set[str]) -> set[tuple[str, str]]:
    """Folders, neither of them within the other, that import each other, at any depth. `imports`: who, and whom."""
    arrows = {
        (here, there)
        for depth in (2, 3, 4)
        for importer, imported in imports
        for here, there in [(folder_of(importer, depth, packages), folder_of(imported, depth, packages))]
        if not f"{here}.".startswith(f"{there}.") and not f"{there}.".startswith(f"{here}.")
    }
    return {(here, there) for here, there in arrows if here < there and (there, here) in arrows}


def test_folders_hold_no_circle(graph: grimp.ImportGraph) -> None:
    """Also where no module does: a and b are one subject if a.x imports b.y and b.z imports a.w."""
    planted = {("d.a.x", "d.b.y"), ("d.b.z", "d.a.w"), ("d.b.y", "d.b"), ("d.c", "d.a.x")}
    assert folder_circles(planted, {"d", "d.a", "d.b"}) == {("d.a", "d.b")}
    imports = {(one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)}
    assert folder_circles(imports, {module.rpartition(".")[0] for module in graph.modules}) == set()


def test_no_python_among_choices_and_templates() -> None:
    found = [p for name in ("workloads", "systems", "slurm", "reports", "patches") for p in (ROOT / name).rglob("*.py")]
    assert found == []


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["io", "--help"], ["report", "--help"], ["ls"]])
def test_the_login_node_path_stays_light(arguments: list[str]) -> None:
    assert_not_imported(arguments, {"torch", "pandas", "numpy", "scipy", "horovod"})


def test_a_report_in_the_terminal_imports_what_it_shows(tmp_path: Path) -> None:
    """Its few runs have no t test, history, job or projected strategy."""
    for plan in plans(points=(1, 2), repeats=3):
        write_run(tmp_path, plan, constant((10.0,) * 6))
    heavy = {"torch", "pandas", "scipy", "jinja2", "dlbench.history.tables", "dlbench.jobs"}
    assert_not_imported(["report", str(tmp_path)], {*heavy, "dlbench.projection.strategies", "dlbench.views.storage"})


def assert_not_imported(arguments: list[str], modules: set[str]) -> None:
    code = (
        "import sys\nfrom dlbench.cli import cli\n"
        f"try:\n    cli({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"heavy = {modules!r} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_class_names_are_unique() -> None:
    """A stack trace and a search lead to one class."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "dlbench").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_module_is_called_utils(graph: grimp.ImportGraph) -> None:
    assert not [m for m in graph.modules if m.rsplit(".", 1)[-1] in {"utils", "helpers", "common"}]


def test_desk_and_machine_room_never_meet(graph: grimp.ImportGraph) -> None:
    desk = {"cli", "jobs", "analysis", "report", "views", "gate", "history", "comm", "perfetto", "exports"}
    for module in graph.modules:
        if room(module).split(".")[0] in desk:
            reached = {m for m in graph.find_upstream_modules(module) if m.startswith("dlbench.node")}
            assert reached == set(), module


def folders(graph: grimp.ImportGraph) -> dict[str, list[str]]:
    """The modules of each package, without the packages in it."""
    found: dict[str, list[str]] = {}
    for module in graph.modules - {other.rpartition(".")[0] for other in graph.modules}:
        package, _, name = module.rpartition(".")
        if package and name != "__main__":
            found.setdefault(package, []).append(name)
    return found


def test_no_family_is_told_by_a_prefix(graph: grimp.ImportGraph) -> None:
    families = []
    for package, modules in folders(graph).items():
        heads = Counter(name.split("_")[0] for name in modules if "_" in name)
        families += [f"{package}: {count} begin with {head}_" for head, count in heads.items() if count >= 4]
    assert families == []


# Modules that open files for reading in another way than `dlbench.opening`, each with why it may.
OPENED_OTHERWISE = {
    "opening": "the one way",
    # The kernel's own files.
    "machine/arithmetic": "/proc",
    "machine/environment": "/proc and /sys",
    "machine/sources": "/proc and /sys",
    "machine/page_cache": "/proc",
    "machine/storage": "/proc",
    "node/ranks": "/sys",
    "node/watching/agent": "/proc",
    "setup/probes": "/sys/fs/cgroup",
    # What is made or appended to.
    "records/rows/shared": "the file that the ranks of a node share",
    # Files of the installation.
    "bundled": "the installer's list of files",
    "machine/cuda_parts": "NCCL's header",
    "report/formats/html": "the bundled page",
    "datasets/making/computed_recipes": "the sources of Python's standard library",
    "datasets/making/image_recipes": "photographs of installed packages",
    # Files of this process, in folders that nobody else may enter, or just made by it.
    "node/sync/horovod/timeline": "a timeline in a folder of this process",
    "node/sync/horovod/report": "a log in a folder of this process",
    "setup/horovod": "a build in a folder of this user",
    "node/training/checkpoint": "a file that it has just written, to sync it; others after `require_file`",
    "node/training/optional_parts": "after `require_file`",
    "datasets/staging/copying": "locks of folders of this user alone, following no link",
    "datasets/making/production": "what it has just made, to sync it; a journal, refused unless it is a regular file",
    # Libraries that open by name, behind a look of their own.
    "history/history": "lines appended to its index, following no link",
    "datasets/arrays": "HDF5, after `require_file`",
    "jobs/processes": "/proc",
    "process_tree": "/proc, and locks of its own folders",
    "records/files": "opened to be written",
}
_METHODS = {"read_text", "read_bytes"}
_CALLS = {"np.load", "np.fromfile", "np.memmap", "os.open", "safe_open", "h5py.File", "tarfile.open"}
_CALLS |= {"sqlite3.connect", "gzip.open", "io.open", "zipfile.ZipFile"}
_MODES = {"mode", "encoding", "errors", "buffering"}


def opened_for_reading(path: Path) -> Iterator[int]:
    """Lines of a module on which it opens a file by its name for reading."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and _opens_by_name(call):
            yield call.lineno


def _opens_by_name(call: ast.Call) -> bool:
    name, text = ast.unparse(call.func), ast.unparse(call)
    is_method = isinstance(call.func, ast.Attribute)
    if is_method and name.rsplit(".", 1)[-1] in _METHODS and not name.startswith("opening."):
        return True
    keywords = {keyword.arg for keyword in call.keywords}
    modes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    # What is made or written, folders, and files that are open already.
    if any(mode[:1] in ("w", "x", "a") and len(mode) <= 2 for mode in modes) or {"fileobj", "closefd"} & keywords:
        return False
    if any(word in text for word in ("O_DIRECTORY", "O_EXCL", "os.devnull", "BytesIO(")):
        return False
    if call.args and isinstance(call.args[0], ast.Name) and call.args[0].id in ("file", "raw"):
        return False
    if name in _CALLS or name == "open":
        return True
    return is_method and name.endswith(".open") and bool(modes or _MODES & keywords or name == "Image.open")


def test_files_are_opened_for_reading_in_one_way() -> None:
    package = ROOT / "dlbench"
    found = {
        path.relative_to(package).with_suffix("").as_posix(): lines
        for path in sorted(package.rglob("*.py"))
        if (lines := list(opened_for_reading(path)))
    }
    assert {name: lines for name, lines in found.items() if name not in OPENED_OTHERWISE} == {}
    assert set(OPENED_OTHERWISE) - set(found) == set(), "no longer needed"
