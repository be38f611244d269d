"""What a projection looks like: one screen of text, a page, tables, JSON, and what it never leaves out. Every refusal
and every flag has a planted case that the projection itself tells, with what would mend it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dlbench.projection.cost import cost_section
from dlbench.projection.ingredients import (
    BatchFigures,
    Ingredients,
    PointFigures,
    QualityFigures,
    RunFigures,
    StorageSupply,
)
from dlbench.projection.page import ProjectionReport, document_of, measured_points, projected_group
from dlbench.projection.page import projection_chart as chart_of
from dlbench.projection.projected import Flag, Projection, Refused, code_texts
from dlbench.projection.spec_machine import elsewhere
from dlbench.projection.step import project
from dlbench.records.exchange import Message
from dlbench.report.chart_style import FORECAST, MEASURED
from dlbench.report.charts import ReportSubject
from dlbench.report.document import Document, Section
from dlbench.report.formats.data import to_csv, to_json
from dlbench.report.formats.html import to_html
from dlbench.report.formats.markdown import to_markdown
from dlbench.report.formats.terminal import to_text
from dlbench.specs.choices import choose_system_with_origins
from dlbench.specs.comm import Level, Piece
from tests.projection.hand_made import FAR, ingredients, projection, target
from tests.support.schemas import validator
from tests.support.training_machine import Machine, network_of

MACHINE = Machine(ranks_per_node=2, run_sd=0.005, hosts=lambda rng, nodes: 0.01 * rng.standard_normal(nodes))
SOUND = MACHINE.ingredients(np.random.default_rng(1), (1, 2, 4))  # 2, 4 and 8 ranks; nothing is to be refused.
FIRST, MIDDLE, ANCHOR = SOUND.points
COSTS = network_of()
AVERAGE = Message(num_bytes=8, num_tensors=1, method="average every 4 updates")
AVERAGED = SOUND.exchange and SOUND.exchange.model_copy(update={"messages": (AVERAGE,)})
BEYOND = Level(pieces=(Piece(alpha_s=1e-5, beta_s_per_byte=1e-9),))
ONE_NODE = {"points": tuple(point.model_copy(update={"nodes": 1}) for point in SOUND.points), "ranks_per_node": 8}
STRONG = {"scaling": "strong"}
BATCHES = {"batches": tuple(BatchFigures(batch_per_rank=b, own_work_s=(0.003 * b,)) for b in (32, 128))}


def with_runs(point: PointFigures, change: Callable[[int, RunFigures], dict[str, Any]]) -> PointFigures:
    """The point with other fields of each run, by its number."""
    runs = [run.model_copy(update=change(number, run)) for number, run in enumerate(point.runs)]
    return point.model_copy(update={"runs": tuple(runs)})


def runs_of(point: PointFigures, count: int = 5, growth: float = 0.0, **changes: Any) -> PointFigures:
    """The point with fewer runs, or other ones; `step_s` grows from run to run."""
    changed = with_runs(point, lambda number, run: {"step_s": run.step_s * (1 + number * growth), **changes})
    return changed.model_copy(update={"runs": changed.runs[:count]})


def with_more(seconds: float) -> PointFigures:
    """The anchor with so much more exchange, of which its messages know nothing."""

    def longer(_: int, run: RunFigures) -> dict[str, Any]:
        parts = {**run.parts, "exchange": run.parts["exchange"] + seconds}
        return {"step_s": run.step_s + seconds, "parts": parts}

    return with_runs(ANCHOR, longer)


def bent(point: PointFigures) -> PointFigures:
    step_s = 0.1 + 0.002 * (point.nodes - 1) ** 2
    return with_runs(point, lambda number, _: {"step_s": step_s + number * 1e-5, "parts": {}})


UNEXPLAINED = with_more(1.5)
BUSY = ANCHOR.model_copy(update={"core_use": 0.2})
BENT = tuple(map(bent, SOUND.points))


def told(changes: dict[str, Any], ranks: int, there: Ingredients | None = None) -> Projection:
    return project(SOUND.model_copy(update=changes), [ranks], other_system=there, draws=200)


@pytest.mark.parametrize(
    ("code", "changes", "ranks", "remedy"),
    [
        ("R1", {"points": (FIRST, MIDDLE, runs_of(ANCHOR, 1))}, 64, "--repeats 5"),
        ("R2", ONE_NODE, 64, "--nodes 1,2,4"),
        ("R3", {"network": None}, 64, "dlbench comm submit --system simulated"),
        ("R3", {"network": COSTS.model_copy(update={"across": None})}, 64, "dlbench comm submit --system simulated"),
        ("R3", {"network": COSTS.model_copy(update={"inside": None})}, 64, "dlbench comm submit --system simulated"),
        ("R3", {"nodes_per_leaf": 4}, 64, "on two leaves"),
        ("R4", {"is_crowded": True}, 64, "its own cores"),
        ("R4", {"shared_cores": 2, "points": (FIRST, MIDDLE, BUSY)}, 64, "its own cores"),
        ("R5", {"network": network_of(across=(2e-3, 1e-7))}, 64, "measure the network of these runs"),
        ("R5", {"points": (FIRST, MIDDLE, UNEXPLAINED)}, 64, "measure the network of these runs"),
        ("R6", {"points": (FIRST, runs_of(MIDDLE, growth=0.2), ANCHOR)}, 64, "repeat"),
        ("R7", {}, 9, "choose 10"),
        ("R7", {}, 1, "measure"),
        ("R7", {}, 1024, "measure 16 ranks or more"),
        ("R7", {}, 10**6, "measure 15,625 ranks or more"),
        ("R7", STRONG, 10, "divisor"),
        ("R9", STRONG, 64, "--set train.batch_per_rank=4"),
        ("R9", STRONG | BATCHES, 64, "--set train.batch_per_rank=4"),
    ],
)
def test_what_was_never_measured_in_kind_is_refused_with_its_remedy(
    code: str, changes: dict[str, Any], ranks: int, remedy: str
) -> None:
    found = told(changes, ranks)
    assert found.targets == ()
    (why,) = found.refused
    assert why.code == code
    assert remedy in why.remedy
    assert "{" not in why.text + why.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"exchange": None},
        {"exchange": None, "network": None},
        {"exchange": AVERAGED},
        {"points": (FIRST, MIDDLE, runs_of(ANCHOR, parts={}))},
        {"points": (FIRST, MIDDLE, ANCHOR.model_copy(update={"strategy": "fsdp"})), "network": None},
    ],
)
def test_steps_without_a_model_are_told_how_far_points_reach(changes: dict[str, Any]) -> None:
    """Costs of the network would not help: no remedy is to measure these."""
    found = told(changes, 64)
    assert found.targets == ()
    assert [why.code for why in found.refused] == ["R7", "R8"]
    assert found.refused[0].remedy == "measure 16 ranks or more"
    assert "dlbench comm submit" not in found.refused[1].remedy
    (near,) = told(changes, 16).targets
    assert "dlbench comm submit" not in near.flags[0].text


def test_time_to_quality_of_too_few_batches_is_refused() -> None:
    """R10 is of the cost alone: the step is projected all the same."""
    quality = QualityFigures(target="75 % accuracy", samples_per_epoch=50_000)
    found = told({}, 16)
    section = cost_section("g", SOUND.model_copy(update={"quality": quality}), found.targets, None, "")
    assert section is not None
    assert any(note.startswith("R10: ") and "measure.noise_scale=true" in note for note in section.notes)
    assert set(code_texts()["refusals"]) == {f"R{number}" for number in range(1, 11)}


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 16),
        ({}, 512),
        (ONE_NODE, 8),
        ({"nodes_per_leaf": 4, "leaf_taper": 2.0}, 16),
        ({"nodes_per_leaf": 4, "network": COSTS.model_copy(update={"beyond": BEYOND})}, 16),
        (STRONG | BATCHES, 16),
    ],
)
def test_what_was_measured_in_kind_is_not_refused(changes: dict[str, Any], ranks: int) -> None:
    assert told(changes, ranks).refused == ()


@pytest.mark.parametrize(
    ("code", "changes", "ranks"),
    [
        ("F1", {"points": SOUND.points[:2]}, 8),
        ("F2", {}, 128),
        ("F3", {"nodes": None}, 16),
        ("F3", {"nodes": SOUND.nodes and SOUND.nodes.model_copy(update={"hosts": (0.0, 0.01)})}, 16),
        ("F4", {"nodes": SOUND.nodes and SOUND.nodes.model_copy(update={"num_maxima": 16})}, 16),
        ("F5", {"supply": StorageSupply(sample_bytes=1e6, bytes_per_s=1e9, nodes=4)}, 64),
        ("F6", {"points": (FIRST, MIDDLE, runs_of(ANCHOR, session="another"))}, 16),
        ("F7", {"network": None}, 16),
        ("F8", {}, 16),
        ("F9", {"nodes_per_leaf": 4, "leaf_taper": 2.0}, 16),
        ("F10", {"points": (FIRST, MIDDLE, with_more(0.02))}, 16),
        ("F12", {"nodes_per_leaf": 4, "leaf_taper": 2.0}, 16),
        ("F13", {"network": None, "points": BENT}, 16),
    ],
)
def test_what_a_figure_does_not_know_is_flagged_beside_it(code: str, changes: dict[str, Any], ranks: int) -> None:
    there = elsewhere(SOUND, choose_system_with_origins("p40-roce", {})[0], None) if code == "F8" else None
    found = told(changes, ranks, there)
    flags = [*found.flags, *found.targets[0].flags]
    assert code in {one.code for one in flags} <= set(code_texts()["flags"])
    assert all("{" not in one.text for one in flags)
    assert code not in {one.code for one in told({}, 16).targets[0].flags}
    if code == "F7":
        assert "dlbench comm submit --system simulated" in flags[0].text


RUN = {"run_id": "a", "step_s": 0.1}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"points": (FIRST, FIRST)}, "ascend by ranks"),
        ({"points": ({"ranks": 3, "nodes": 2, "runs": [RUN]}, ANCHOR)}, "does not fill nodes of 2 ranks"),
        (
            {"points": [{"ranks": 2, "nodes": 1, "runs": [RUN | {"step_s": -0.1}]}]},
            "greater than or equal to 0.000000001",
        ),
        ({"points": [{"ranks": 2, "nodes": 1, "runs": [RUN, RUN]}]}, "each run needs its own name"),
        ({"points": (ANCHOR.model_dump() | {"leaves": (0,)},)}, "leaf switches of 1 nodes, but 8 ranks use 4"),
        ({"points": (ANCHOR,), "nodes": {"hosts": [], "maxima": [3, 1, 2]}}, "ascend"),
        (
            {"points": [{"ranks": 2, "nodes": 1, "runs": [RUN | {"parts": {"compute": 0.05}}]}]},
            "the causes of run a sum to 0.05 s, its step is 0.1 s",
        ),
        *(
            ({"points": [{"ranks": 2, "nodes": 1, "runs": [RUN | {"parts": {"compute": 0.1, **more}}]}]}, why)
            for more, why in (
                ({}, "forward, backward, optimizer of run a sum to 0 s, its compute is 0.1 s"),
                ({"forward": 30.0}, "sum to 30 s, its compute is 0.1 s"),
                ({"forward": 0.1, "wait": 0.05}, "wait, copy of run a sum to 0.05 s, its input is 0 s"),
            )
        ),
    ],
)
def test_ingredients_that_contradict_themselves_are_none(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Ingredients(**{"title": "t", "source": "s", **changes})


SUBJECT = ReportSubject("g", "resnet50")


def document(made: Projection | None = None, *, more: tuple[Section, ...] = (), **given: Any) -> Document:
    group = projected_group("abc", ingredients(**given), made or projection(), more_sections=more)
    return document_of(ProjectionReport(title="Projection", as_of="2026-11-24T18:00:00Z", groups=(group,)))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_one_screen_answers() -> None:
    text = to_text(document())
    assert len(text.splitlines()) <= 24
    said = flat(text)
    for words in (
        "resnet50 ci, DDP over Gloo, system box",
        "From 20 runs at 1, 2, 4 and 8 ranks; anchor (the largest measured point) 8 ranks on 8 nodes, 5 runs",
        "synthetic data; network box, torch-gloo, 48 points; runs.",
        "256 65.8 % [62.5, 69.1] [62, 70] 53,895 exchange, 17 % F2",
        "Held out as a test: the step at 8 ranks, projected from 4, is 1.3 % too long: 117 ms, measured 116 ms.",
        "F2 (256 ranks): far: 32 times the largest measured rank count.",
        "Refused, R7 (1,024 ranks): 1024 ranks are more than 64 times the largest measured count, 8. Remedy: measure",
    ):
        assert words in said


def test_one_flag_and_one_reason_are_a_line_each() -> None:
    pooled = Flag(code="F6", text="its points are of 2 sessions")
    refused = tuple(Refused(code="R2", ranks=ranks, text="no", remedy="--nodes 1,2") for ranks in (16, 32))
    targets = (target(64, flags=(pooled,)), target(128, flags=(pooled,)))
    said = flat(to_text(document(projection(*targets, flags=(pooled,), refused=refused))))
    assert "F6: its points are of 2 sessions." in said
    assert "Refused, R2 (16 and 32 ranks): no. Remedy: --nodes 1,2" in said


def test_a_projection_of_nothing_says_why_everywhere() -> None:
    why = Refused(code="R4", ranks=None, text="ranks shared cores", remedy="give ranks cores of their own")
    made = projection(refused=(why,), held_out=())
    made = Projection(**{**vars(made), "targets": ()})
    found = document(made)
    for text in (to_text(found), to_markdown(found), to_html(found)):
        assert "ranks shared cores" in text
        assert "give ranks cores of their own" in text
    assert to_csv(found, "targets").count("\n") == 1


def test_json_holds_to_its_schema_and_has_all_quantiles() -> None:
    content = json.loads(to_json(document()))
    validator("projection").validate(content)
    (group,) = content["groups"]
    first = group["projection"]["targets"][0]
    assert len(first["step"]["quantiles"]) == 9
    assert group["projection"]["refused"][0]["code"] == "R7"
    assert "more" not in group


def test_measured_is_filled_and_projected_hollow() -> None:
    drawn = chart_of(SUBJECT, measured_points(ingredients()), (target(64), target(256, flags=(FAR,))))
    colour = drawn.spec["layer"][0]["encoding"]["color"]["scale"]
    assert dict(zip(colour["domain"], colour["range"], strict=True))["measured"] == MEASURED
    assert dict(zip(colour["domain"], colour["range"], strict=True))["projected"] == FORECAST
    points = [layer for layer in drawn.spec["layer"] if layer["mark"]["type"] == "point"]
    rows = [layer["data"].get("values") or drawn.spec["datasets"][layer["data"]["name"]] for layer in points]
    filled = {some[0]["series"]: layer["mark"]["filled"] for some, layer in zip(rows, points, strict=True)}
    assert filled == {"measured": True, "projected": False}
    assert "64 ranks, projected: 71 % [68, 75]" in drawn.alt
    assert "1 rank, measured: 100.0 %" in drawn.alt


@pytest.mark.parametrize(("scaling", "batch", "second"), [("weak", 32, 0.1 / 0.104), ("strong", None, 0.1 / 0.208)])
def test_efficiency_of_measured_points(scaling: str, batch: int | None, second: float) -> None:
    given = ingredients(scaling=scaling)
    points = tuple(point.model_copy(update={"batch_per_rank": batch}) for point in given.points)
    found = measured_points(given.model_copy(update={"points": points}))
    assert found[0].efficiency.value == 1
    assert found[1].efficiency.value == pytest.approx(second, rel=1e-9)
    assert (found[1].throughput is None) == (batch is None)
