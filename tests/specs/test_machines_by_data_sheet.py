"""The sections `device` and `network` of a system file, and the systems that are modelled alone."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlbench.analysis.comparability import averaged_id, system_content
from dlbench.errors import UserError
from dlbench.records.scan import Run
from dlbench.specs.choices import choose_system, choose_system_with_origins
from dlbench.specs.files import available, read_yaml
from dlbench.specs.system import NetworkSpec, SystemSpec
from tests.conftest import Cli
from tests.support.run_factory import plans

MODELLED = ("abci", "p40-roce")
LINK = {"alpha_s": 1e-6, "gb_per_s": 10, "source": "a data sheet"}


@pytest.mark.parametrize("name", MODELLED)
def test_a_modelled_system_says_so_and_names_a_source_of_every_value(name: str) -> None:
    system = choose_system_with_origins(name, {})[0]
    assert system.modelled
    assert system.title.endswith("(modelled, not measured)")
    text = available("systems")[name].read_text(encoding="utf-8")
    head = text[: text.index("format: ")]
    assert "modelled, not measured. dlbench never ran there." in " ".join(head.replace("#", "").split())
    assert re.search(r"# Sources, 20\d\d-\d\d-\d\d, read: ", head)
    content = read_yaml(available("systems")[name])
    links = [content["network"][level] for level in ("inside", "across")]
    assert all("start-up: " in link["source"] and "rate: " in link["source"] for link in links)
    assert content["device"]["source"].startswith(("memory: ", "NVIDIA "))


@pytest.mark.parametrize(
    "command", [("run", "resnet50", "--system"), ("submit", "bert", "--nodes", "1", "--system"), ("preflight",)]
)
def test_nothing_runs_on_a_modelled_system(cli: Cli, command: tuple[str, ...]) -> None:
    done = cli(*command, "abci", *(("--dry-run",) if command[0] != "preflight" else ()))
    assert done.returncode == 2
    assert "abci: modelled is true: it is only described by a data sheet; use another one" in done.stderr


@pytest.mark.parametrize(
    ("network", "why"),
    [
        ({"across": LINK, "leaf_taper": 2.0}, "leaf_taper and beyond need nodes_per_leaf"),
        ({"across": LINK, "nodes_per_leaf": 8}, "nodes_per_leaf needs leaf_source"),
        (
            {"beyond": {**LINK, "links": 4}, "leaf_taper": 2.0, "nodes_per_leaf": 8, "leaf_source": "x"},
            "have the same meaning",
        ),
        ({"across": {**LINK, "speed": 3}}, "speed"),
        ({"across": {"alpha_s": 1e-6, "gb_per_s": 10}}, "source"),
        ({"across": {**LINK, "gb_per_s": -1}}, "gb_per_s"),
        ({"across": {**LINK, "links": 0}}, "links"),
    ],
)
def test_a_network_that_contradicts_itself_is_refused(network: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NetworkSpec(**network)


def test_data_sheets_separate_no_runs_and_are_refused_as_a_setting_of_runs() -> None:
    (plan,) = plans(points=(1,), repeats=1)
    sheets = choose_system_with_origins("abci", {})[0].model_dump(include={"device", "network"})
    system = SystemSpec.model_validate({**plan.system.model_dump(), **sheets})
    bare, stated = (
        cast("Run", SimpleNamespace(plan=one, record=None))
        for one in (plan, plan.model_copy(update={"system": system}))
    )
    assert averaged_id(bare) == averaged_id(stated)
    assert system_content(bare.plan) == system_content(stated.plan)
    with pytest.raises(UserError, match=r"system\.device\.memory_gb_per_s: has no effect in any run"):
        plans(points=(1,), overrides={"system.device.memory_gb_per_s": 100.0, "system.device.source": "x"})
    with pytest.raises(UserError, match="modelled is true"):
        choose_system("local", {"modelled": (True, "--set")})
