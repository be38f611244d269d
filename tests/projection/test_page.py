"""What a projection looks like: one screen of text, a page, tables, JSON; and what it never leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlbench.projection.page import (
    ProjectionReport,
    document_of,
    measured_points,
    projected_group,
)
from dlbench.projection.page import projection_chart as chart_of
from dlbench.projection.projected import Flag, Projection, Refused
from dlbench.report.chart_style import FORECAST, MEASURED
from dlbench.report.charts import ReportSubject
from dlbench.report.document import Document, Section
from dlbench.report.formats.data import to_csv, to_json
from dlbench.report.formats.html import to_html
from dlbench.report.formats.markdown import to_markdown
from dlbench.report.formats.terminal import to_text
from tests.projection.hand_made import FAR, ingredients, projection, target
from tests.support.schemas import validator

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
