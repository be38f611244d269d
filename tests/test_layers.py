"""The house: who may import whom (docs/architecture.md), no circle, and what a login node must never load."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import grimp
import pytest

from tests.support.paths import ROOT

BASE = {"errors", "units", "bundled", "pool", "process_tree", "confidential"}
"""The ground: every room may import it."""
NODE_FLOOR = BASE | {"specs", "datasets", "machine", "costs", "records"}
READING = BASE | {"specs", "records", "stats", "reading"}
PAGE = READING | {"report", "costs"}

# Room -> rooms it may import (itself included implicitly). The table of docs/architecture.md.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "bundled": {"errors"},
    "pool": {"errors"},
    "confidential": set(),
    "process_tree": set(),
    "supervisor": {"process_tree"},
    "stats": BASE,
    "specs": BASE,
    "machine": BASE,
    "setup": BASE | {"machine"},
    "datasets": BASE | {"specs"},
    "costs": BASE | {"specs"},
    "records": BASE | {"specs"},
    "jobs": BASE | {"specs", "records", "machine"},
    "reading": BASE | {"specs", "records", "stats"},
    "report": BASE | {"stats"},
    "perfetto": BASE | {"records"},
    "exports": BASE | {"specs", "records"},
    "history": READING | {"report"},
    "gate": READING | {"report"},
    "collectives": PAGE,
    "views": PAGE | {"history", "exports"},
    "cli": BASE
    | {"specs", "records", "datasets", "costs", "setup", "jobs", "stats", "reading", "report"}
    | {"views", "gate", "history", "collectives", "perfetto", "exports"},
    "node.models": NODE_FLOOR,
    "node.data": NODE_FLOOR | {"node.models", "node.preflight"},
    "node.sync": NODE_FLOOR | {"node.ranks", "node.rendezvous", "node.failures"},
    "node.training": NODE_FLOOR
    | {"node.models", "node.data", "node.sync", "node.watching", "node.ranks", "node.cores"},
    "node.watching": NODE_FLOOR | {"node.ranks", "node.rendezvous"},
    "node.collectives": NODE_FLOOR | {"node.sync", "node.ranks", "node.rendezvous", "node.failures"},
    # The pieces of `dlbench.node` beside its rooms: the entry and what it needs before torch.
    "node.ranks": NODE_FLOOR,
    "node.cores": NODE_FLOOR | {"node.ranks"},
    "node.failures": NODE_FLOOR,
    "node.preflight": NODE_FLOOR | {"node.ranks"},
    "node.rendezvous": NODE_FLOOR | {"node.ranks"},
    "node.__main__": NODE_FLOOR
    | {"node.ranks", "node.cores", "node.failures", "node.preflight"}
    | {"node.sync", "node.watching", "node.training", "node.collectives"},
    "__main__": {"cli"},
}


def room(module: str) -> str:
    """The room a module belongs to: `dlbench.node.data.jpeg` -> `node.data`."""
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


def test_no_python_among_choices_and_templates() -> None:
    found = [p for name in ("workloads", "systems", "slurm", "reports") for p in (ROOT / name).rglob("*.py")]
    assert found == []


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["report", "--help"], ["ls"]])
def test_the_login_node_path_stays_light(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom dlbench.cli import cli\n"
        f"try:\n    cli({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'scipy', 'horovod', 'altair'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_is_called_utils(graph: grimp.ImportGraph) -> None:
    assert not [m for m in graph.modules if m.rsplit(".", 1)[-1] in {"utils", "helpers", "common"}]


def test_desk_and_machine_room_never_meet(graph: grimp.ImportGraph) -> None:
    desk = {"cli", "jobs", "reading", "report", "views", "gate", "history", "collectives", "perfetto", "exports"}
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


def test_no_folder_is_crowded(graph: grimp.ImportGraph) -> None:
    # One file a command: there are as many as there are commands.
    crowded = {name: len(modules) for name, modules in folders(graph).items() if len(modules) > 20}
    assert set(crowded) <= {"dlbench.cli"}, crowded


def test_no_family_is_told_by_a_prefix(graph: grimp.ImportGraph) -> None:
    families = []
    for package, modules in folders(graph).items():
        heads = Counter(name.split("_")[0] for name in modules if "_" in name)
        families += [f"{package}: {count} begin with {head}_" for head, count in heads.items() if count >= 4]
    assert families == []
