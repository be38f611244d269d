"""`--ab A B`: two sides of every point, interleaved; what is refused; tags; and that reports stay sane."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.cli import cli
from dlbench.errors import ExitCode, UserError
from dlbench.jobs import local
from dlbench.jobs.local import RunOutcome
from dlbench.records.folder import RunFolder
from dlbench.records.scan import scan
from dlbench.specs.plan import AxisValue, RunPlan
from dlbench.specs.requests import parse_sides, parse_tags
from dlbench.specs.series import pairs, side_words
from tests.support.run_factory import WORKLOAD, constant, plans, write_run

TIMES = [5.0, 0.0, 30.0, 50.0, 10.0, 5.0]
CI_VARIABLES = {"CI_COMMIT_SHA": None, "GITHUB_SHA": None}


def sided(b: dict[str, Any] | None = None, a: dict[str, Any] | None = None, **request: Any) -> list[RunPlan]:
    """Plans of a comparison; b changes how gradients travel unless told otherwise."""
    settings_b = {"engine.name": "ddp"} if b is None else b
    return plans(**{"points": (2,), "repeats": 2, "sides": {"a": a or {}, "b": settings_b}, **request})


# --- texts ------------------------------------------------------------------------------------------------------------

GOOD: list[tuple[str, dict[str, AxisValue]]] = [
    ("plain", {}),
    (" plain ", {}),
    ("engine.name=ddp", {"engine.name": "ddp"}),
    ("engine.name=ddp,sync.fusion=own:single", {"engine.name": "ddp", "sync.fusion": "own:single"}),
    ("engine.name=ddp, sync.fusion=own:single", {"engine.name": "ddp", "sync.fusion": "own:single"}),
    ("fault.step_delay_s=0.05", {"fault.step_delay_s": 0.05}),
    ("fault.ranks=0,3,fault.step_delay_s=1.5", {"fault.ranks": "0,3", "fault.step_delay_s": 1.5}),
    ("fault.step_delay_s=1.5,fault.ranks=0,3", {"fault.ranks": "0,3", "fault.step_delay_s": 1.5}),
    ("system.python=/new env/bin/python", {"system.python": "/new env/bin/python"}),
    ('x="a,b=c",y=2', {"x": "a,b=c", "y": 2}),
    ("x='it''s,y=1'", {"x": "it's,y=1"}),
    (r'x="say \"hi\",z=1",y=true', {"x": 'say "hi",z=1', "y": True}),
    ("x=a=b", {"x": "a=b"}),
    ("x=null", {"x": None}),
]


@pytest.mark.parametrize(("text", "expected"), GOOD)
def test_a_side_is_plain_or_settings_with_commas_between(text: str, expected: dict[str, AxisValue]) -> None:
    other = "other=1"
    found = parse_sides((other, text))
    assert found == {"a": {"other": 1}, "b": expected}
    assert [type(v) for v in found["b"].values()] == [type(expected[k]) for k in found["b"]]
    assert parse_sides((text, other))["a"] == expected


KEYS = st.from_regex(r"[a-z_]{1,4}(\.[a-z_]{1,4}){0,2}", fullmatch=True)
BAD: list[tuple[tuple[str, str], list[str]]] = [
    (("plain", ""), ["side b", "KEY=VALUE", "plain"]),
    (("plane", "plain"), ["side a", "'plane'"]),
    (("plain", "engine.name"), ["side b", "'engine.name'"]),
    (("plain", "=ddp"), ["side b"]),
    (("plain", "k="), ["side b", "k: the value is empty"]),
    (("plain", "k=,l=1"), ["side b", "k: the value is empty"]),
    (("plain", "k=1,k=2"), ["side b", "k: given twice"]),
    (("plain", "k='abc"), ["side b", "KEY=VALUE"]),
    (("plain", "k='a'b"), ["side b", "KEY=VALUE"]),
    (("plain", "k=[[1]]"), ["side b", "one value"]),
    (("k=1", "k=1"), ["both sides set k=1", "plain plain", "--set"]),
    (("k=1,l=2", "l=2,k=1"), ["both sides set"]),
]


@pytest.mark.parametrize(("texts", "words"), BAD)
def test_a_text_that_is_no_side_is_answered_in_one_line(texts: tuple[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_sides(texts)
    told = str(caught.value)
    assert told.startswith("--ab")
    assert [word for word in words if word not in told] == [], told
    assert len(told.splitlines()) == 1


# --- plans ------------------------------------------------------------------------------------------------------------


@given(points=st.sampled_from([(1,), (2,), (1, 2), (1, 2, 4)]), repeats=st.integers(1, 4))
@settings(max_examples=12)
def test_pairs_run_back_to_back_and_every_second_the_other_way_round(points: tuple[int, ...], repeats: int) -> None:
    made = sided(b={"train.seed": 7}, points=points, repeats=repeats)
    expected = []
    for repeat in range(repeats):
        order, sides = (points, "ab") if repeat % 2 == 0 else (points[::-1], "ba")
        expected += [(repeat, ranks, side) for ranks in order for side in sides]
    assert [(p.series.repeat, p.layout.ranks, p.series.side) for p in made] == expected
    assert [p.series.position for p in made] == list(range(len(expected)))
    assert len({p.run_id for p in made}) == len(made)
    for plan in made:
        assert plan.run_id.endswith(f"-k{plan.series.repeat:02d}-{plan.series.side}")
        assert plan.series.sides == {"a": {}, "b": {"train.seed": 7}}
        assert plan.series.variant == "plain"
        assert plan.workload.train.seed == (7 if plan.series.side == "b" else 0)
        assert RunPlan.model_validate(json.loads(plan.to_json())) == plan
    for one, other in pairs(made):
        assert (one.series.side, other.series.side) == ("a", "b")
        assert abs(one.series.position - other.series.position) == 1
        assert one.layout == other.layout


def test_each_side_has_its_own_settings_over_the_options_of_both() -> None:
    made = sided(
        a={"sync.fusion": "own:single"},
        b={"engine.name": "ddp", "system.python": "/new/bin/python", "system.launch.environment.X": "1"},
        engine="horovod",
        overrides={"train.seed": 3},
    )
    one, other = pairs(made)[0]
    assert (one.engine.name, str(one.sync.fusion), one.system.python, one.system.launch.environment) == (
        "horovod", "own:single", None, {},
    )  # fmt: skip
    assert (other.engine.name, str(other.sync.fusion), other.system.python) == ("ddp", "auto", "/new/bin/python")
    assert other.system.launch.environment == {"X": "1"}
    assert {plan.workload.train.seed for plan in made} == {3}
    assert {tuple(plan.overrides) for plan in made} == {("train.seed",)}
    assert side_words(one) == "sync.fusion=own:single"
    assert side_words(other) == "engine.name=ddp, system.python=/new/bin/python, system.launch.environment.X=1"


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a wrong key": ({"b": {"train.sed": 1}}, ["--ab (side b)", "train.sed: unknown key", "seed"]),
    "a wrong value": ({"a": {"engine.name": "hvd"}, "b": {}}, ["--ab (side a)", "engine.name"]),
    "a wrong key of the system": ({"b": {"system.lunch.pin": True}}, ["--ab (side b)", "system.lunch"]),
    "another preset": ({"b": {"preset": "full"}}, ["--ab (side b) preset", "its own option"]),
    "what --set gives": (
        {"b": {"train.seed": 1}, "overrides": {"train.seed": 2}},
        ["--ab (side b) train.seed", "also given to --set"],
    ),
    "inert on its side": ({"b": {"engine.ddp.backend": "gloo"}}, ["--ab (side b) engine.ddp.backend", "no effect"]),
    # It acts on side a only, where nobody set it.
    "inert though it acts on the other": (
        {"a": {"engine.name": "ddp"}, "b": {"engine.ddp.backend": "gloo"}},
        ["--ab (side b) engine.ddp.backend", "no effect"],
    ),
    "what is so anyway": ({"b": {"engine.name": "horovod"}}, ["both sides give the same plan", "engine.name"]),
    "an option that both replace": (
        {"a": {"engine.name": "horovod"}, "b": {"engine.name": "ddp"}, "engine": "ddp"},
        ["--engine: has no effect", "both sides"],
    ),
    "a sweep": ({"sweep": {"train.seed": (1, 2)}}, ["--ab", "--sweep"]),
    "variants": ({"decompose": True}, ["--ab", "--decompose"]),
    "quality": ({"to_accuracy": True}, ["--ab", "--to-accuracy"]),
    "a side to a quality": (
        {"b": {"measure.until": "quality", "data.source": "/data/x"}},
        ["side b", "measure.until quality"],
    ),
    "a plan that cannot be": ({"b": {"engine.name": "single"}}, ["side b of --ab", "engine 'single'", "not 2"]),
    "other ranks": (
        {"b": {"system.node.ranks": 2}, "system": "box", "points_are": "nodes"},
        ["same ranks", "side a has 2, side b 4"],
    ),
    "a fault on no rank": ({"b": {"fault.ranks": 5, "fault.step_delay_s": 0.1}}, ["fault.ranks", "rank 5"]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_makes_no_pair_is_refused_in_one_line(why: str) -> None:
    request, words = REFUSED[why]
    with pytest.raises(UserError) as caught:
        sided(**request)
    told = str(caught.value)
    assert [word for word in words if word not in told] == [], told
    assert len(told.splitlines()) == 1


# --- tags -------------------------------------------------------------------------------------------------------------


ON_SLURM = {"system": "box", "points": (1,), "points_are": "nodes"}


@pytest.mark.parametrize(
    "b",
    [
        {"system.modules": "nccl/2.99"},
        {"system.setup": "export NCCL_ALGO=Ring"},
        {"system.python": "/new/bin/python"},
        {"system.launch.environment.NCCL_ALGO": "Ring"},
        {"system.launch.pin": True},
        {"system.slurm.cpus_per_task": False},
    ],
)
def test_what_ranks_see_is_one(b: dict[str, Any]) -> None:
    assert len(sided(b, **ON_SLURM)) == 4


def test_tags_are_text_and_change_nothing() -> None:
    tags = parse_tags(("commit=0012e4", "branch=main", "why=a=b, c", "n=007"))
    assert tags == {"commit": "0012e4", "branch": "main", "why": "a=b, c", "n": "007"}
    (with_tags,) = plans(points=(1,), repeats=1, tags=tags)
    (without,) = plans(points=(1,), repeats=1)
    assert with_tags.tags == tags
    assert with_tags.configuration_digest() == without.configuration_digest()


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """A run takes over the signals that end it, and a command leaves them as they are when it ends."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def run_stubbed(out: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **variables: str) -> Result:
    """`dlbench run` whose runs are written in an instant; those of side b take 20 % longer."""

    def trained(plan: RunPlan, folder: RunFolder, on_progress: object) -> RunOutcome:
        shutil.rmtree(folder.path)
        slower = 1.2 if plan.series.side == "b" else 1.0
        drift = 1 + plan.series.repeat / 100
        write_run(folder.path.parent, plan, constant([part * slower * drift for part in TIMES]))
        return RunOutcome(exit_code=ExitCode.OK, detail="")

    monkeypatch.setattr(local, "run", trained)
    words = ["run", str(WORKLOAD), "--engine", "ddp", "--out", str(out), "--series", "s", *options]
    return CliRunner().invoke(cli, words, env={**CI_VARIABLES, **variables})


AB = ("--ranks", "2", "--ab", "plain", "train.seed=7")


@pytest.mark.usefixtures("signals_as_before")
def test_the_command_runs_pairs_and_tells_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dlbench.gate.page import paired_lines

    done = run_stubbed(tmp_path, monkeypatch, *AB, "--repeats", "5")
    assert done.exit_code == 0, done.output
    assert "give no verdict" not in done.stderr
    found = scan(tmp_path)
    assert len(found.runs) == 10
    lines = paired_lines(found)
    assert lines
    assert done.stdout == "".join(f"{line}\n" for line in lines)
    assert "side b" in done.stderr


# --- the ordinary report ----------------------------------------------------------------------------------------------
