"""The page in a real browser: of made runs, of hostile ones, of a large one, and of ranks that really ran here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dlbench.cli import cli as command_line
from dlbench.records.scan import scan
from dlbench.report import wording
from dlbench.report.formats import html
from dlbench.views import model
from dlbench.views.scaling_report import SCALING, assemble, document_of
from tests.report.test_report import PAYLOAD, write_hostile, write_sample
from tests.support.browser import Visit, violations
from tests.support.run_factory import constant, plans, write_run, write_scaling
from tests.support.watch_factory import large_run

pytestmark = pytest.mark.browser


class Case:
    def __init__(self, runs: Path, folder: Path) -> None:
        self.report = assemble(scan(runs))
        self.path = folder / "report.html"
        self.path.write_text(html.to_html(document_of(self.report)), encoding="utf-8")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("sample")
    write_sample(folder / "runs")
    # A curve that holds, beyond one node: there is a projection to draw.
    write_law(folder / "runs")
    return Case(folder / "runs", folder)


def write_law(out: Path) -> None:
    """Weak scaling that loses a fifth, on 1, 2, 4 and 8 nodes of a rank."""
    nodes = {"system": "box", "points_are": "nodes", "ranks_per_node": 1, "launcher": "mpirun"}
    for plan in plans(points=(1, 2, 4, 8), series="law", overrides={"train.batch_per_rank": 2}, **nodes):
        k = plan.layout.ranks
        step = 100 * (1 + 0.2 * (1 - 1 / k)) * (1 + plan.series.repeat / 1000)
        write_run(out, plan, constant([0, 0, 40, 50, max(0.0, step - 100), 10]))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("large")
    for repeat in range(2):
        for ranks in (8, 128):
            large_run(folder / "runs", ranks=ranks, steps=100, seed=repeat, repeat=repeat, repeats=2)
    return Case(folder / "runs", folder)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("hostile")
    write_hostile(folder / "runs")
    return Case(folder / "runs", folder)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One and two ranks that really trained on this machine."""
    folder = tmp_path_factory.mktemp("real")
    arguments = ["run", "cosmoflow", "--preset", "ci", "--data", "synthetic", "--engine", "ddp", "--ranks", "1,2"]
    arguments += ["--repeats", "2", "--set", "measure.warmup_steps=2", "--set", "measure.measured_steps=12"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dlbench", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Case(folder / "runs", folder)


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Five runs at one and two ranks that scatter by a few percent, and lose to the wire and to input."""
    folder = tmp_path_factory.mktemp("scattered")
    for plan in plans(repeats=5):
        k, scatter = plan.layout.ranks, 1 + 0.02 * (plan.series.repeat * (2 + plan.layout.ranks) % 5)
        write_run(folder / "runs", plan, constant([part * scatter for part in (5 * k, 0, 30, 45, 20 * (k - 1), 10)]))
    return Case(folder / "runs", folder)


LIKEWISE = [("large", 320), ("sample", 400), ("large", 1280)]
CASES = ["sample", "large", pytest.param("real", marks=[pytest.mark.slow, pytest.mark.nightly])]


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.getfixturevalue(request.param)
    return found


def shown_groups(report: model.Report) -> Iterator[tuple[str, Any, model.Group]]:
    for group in report.groups:
        for view in SCALING.group:
            yield f"{view.id}-{group.id}", view, group


# Reading


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_charts_come_alive_without_a_request_or_a_complaint(browser: Any, case: Case) -> None:
    with Visit(browser, case.path) as visit:
        assert visit.page.locator("figure[data-chart]").count() >= 5
        visit.see_all_charts()
        visit.open_all()
        point = visit.page.locator("[id^=scaling] .live svg .mark-symbol.role-mark path").last
        if point.count():
            point.scroll_into_view_if_needed()
            point.hover()
            visit.page.wait_for_selector("#vg-tooltip-element.visible")
            assert "ranks" in visit.page.locator("#vg-tooltip-element").inner_text()
        assert visit.requests == [case.path.as_uri()]
        assert visit.complaints == []


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_every_view_shows_something_or_says_what_would(browser: Any, case: Case) -> None:
    with Visit(browser, case.path) as visit:
        numbers = json.loads(visit.page.locator("#chart-specs").text_content())["tables"]
        for anchor, view, group in shown_groups(case.report):
            place = visit.page.locator(f"[id='{anchor}']")
            if view.section(group) is not None:
                assert place.count() == 1, anchor
                text = place.text_content()
                assert place.locator("table, svg").count() or len(text) > 60, anchor
                for figure in place.locator("figure").all():
                    assert figure.locator(".still svg").count() == 1
                    known = numbers.get(figure.get_attribute("id")) or figure.locator("table tbody tr").all()
                    assert known, anchor
            elif view.remedy(group):
                assert len(place.text_content()) > len(view.title) + 20, anchor


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_page_reads_without_scripts(browser: Any, case: Case) -> None:
    with Visit(browser, case.path, java_script_enabled=False) as visit:
        stills = visit.page.locator(".still svg")
        assert stills.count() == visit.page.locator("figure").count() >= 5
        shown = [still.bounding_box() for still in stills.all() if still.is_visible()]
        assert len(shown) >= 3
        assert all(box["height"] > 40 for box in shown)
        assert visit.page.get_by_text("MLPerf-derived workload, not an MLPerf result", exact=True).first.is_visible()
        # All groups stand below each other; what is closed opens by itself.
        assert all(group.is_visible() for group in visit.page.locator("section.group").all())
        assert all(link.is_visible() for link in visit.page.locator(".side a").all())
        for place, wanted in (("#runs", "#table-runs table"), ("#data", "#data-points a[download]")):
            assert not visit.page.locator(wanted).is_visible()
            visit.page.locator(f"{place} > summary, {place} > details > summary").click()
            assert visit.page.locator(wanted).is_visible()
        assert visit.requests == [case.path.as_uri()]


@pytest.mark.parametrize(
    ("case", "width"),
    [
        *(("sample", 320), ("large", 400), ("sample", 1280)),
        *(pytest.param(case, width, marks=pytest.mark.nightly) for case, width in LIKEWISE),
    ],
    indirect=["case"],
)
def test_page_needs_no_sideways_scrolling(browser: Any, case: Case, width: int) -> None:
    with Visit(browser, case.path, viewport={"width": width, "height": 800}) as visit:
        visit.see_all_charts()
        visit.open_all()
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


# Access


@pytest.mark.parametrize(
    ("case", "scheme", "width"),
    [
        ("sample", "light", 320),
        ("large", "dark", 1280),
        pytest.param("sample", "light", 1280, marks=pytest.mark.nightly),
        pytest.param("sample", "dark", 1280, marks=pytest.mark.nightly),
        pytest.param("large", "light", 1280, marks=pytest.mark.nightly),
        pytest.param("real", "light", 1280, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
    indirect=["case"],
)
def test_axe_finds_nothing(browser: Any, case: Case, scheme: str, width: int) -> None:
    context = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "bypass_csp": True}
    with Visit(browser, case.path, **context) as visit:
        visit.see_all_charts()
        visit.open_all()
        assert violations(visit) == []


CONTRAST = """() => {
    const luminance = (text) => {
        const parts = text.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
            .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const paper = luminance(getComputedStyle(document.body).backgroundColor);
    const low = [];
    for (const element of document.querySelectorAll("p, li, td, th, dd, dt, h1, h2, h3, button, .chart svg text")) {
        const style = getComputedStyle(element);
        // White words stand on bars, whose colours are the same in both schemes.
        if (!element.getClientRects().length || element.getAttribute("fill") === "#ffffff") continue;
        const ink = luminance(element.closest("svg") ? style.fill : style.color);
        const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        if (ratio < 4.5) low.push(`${element.tagName} ${element.textContent.slice(0, 30)} ${ratio.toFixed(1)}`);
    }
    return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(browser: Any, sample: Case, scheme: str) -> None:
    """Contrast against the page of at least 4.5 (WCAG 2.2, 1.4.3), in the axes and legends of charts as well."""
    with Visit(browser, sample.path, color_scheme=scheme) as visit:
        visit.see_all_charts()
        visit.open_all()
        assert visit.page.evaluate(CONTRAST) == []


def test_scheme_is_chosen_by_keyboard(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path, color_scheme="light") as visit:
        colours = []
        chooser = visit.page.get_by_role("button", name="Colours")
        for _ in range(4):
            colours.append(visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))
            chooser.press("Enter")
        auto, light, dark, again = colours
        assert auto == light == again != dark
        assert visit.page.evaluate(CONTRAST) == []
        assert visit.complaints == []


# Exploring


def test_tables_sort_and_filter_by_keyboard(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path, "#table-runs") as visit:
        button = visit.page.locator("#table-runs table").get_by_role("button", name="Samples/s")
        rows = visit.page.locator("#table-runs tbody tr")
        titles = visit.page.locator("#table-runs thead th").all_text_contents()
        # The first cell of a row is its header.
        place = next(index for index, title in enumerate(titles) if "Samples/s" in title) - 1
        for order, pick in (("ascending", min), ("descending", max)):
            button.press("Enter")
            assert visit.page.locator(f"#table-runs th[aria-sort={order}]").count() == 1
            shown = [cell for row in rows.all() if (cell := row.locator("td").nth(place).get_attribute("data-value"))]
            assert float(shown[0]) == pick(map(float, shown))
            # Runs without figures come last either way.
            assert rows.last.locator("td").nth(place).get_attribute("data-value") == ""
        visit.page.locator("#table-runs").get_by_label("Show lines with:").fill("failed")
        assert visit.page.locator("#table-runs tbody tr:visible").count() == 1
        assert visit.page.get_by_role("status").filter(has_text="1 of").count() == 1
        assert visit.complaints == []


def test_tables_sort_by_value_and_keep_their_sums(browser: Any, sample: Case) -> None:
    """Text with units sorts by what it means: 5 ms before 40 ms, 850 µs before 2 ms; a sum stays at the end."""
    with Visit(browser, sample.path) as visit:
        table = visit.page.locator("[id^=table-parts-] table").last
        visit.open_all()
        table.locator("thead button").nth(1).press("Enter")
        cells = [row.locator("td").first.inner_text() for row in table.locator("tbody tr:not(.of)").all()]
        names = [row.locator("th").inner_text() for row in table.locator("tbody tr").all()]
        assert names[-1].startswith("sum")
        assert names[names.index("compute") + 1].startswith("of it ")
        units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
        values = [float(text.split()[0]) * units[text.split()[1].split("[")[0]] for text in cells[:-1]]
        assert values == sorted(values)


def test_long_tables_have_a_filter(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path) as visit:
        visit.open_all()
        for table in visit.page.locator("main table").all():
            lines = table.locator("tbody tr").count()
            # The tools stand right before the table's frame.
            filters = table.locator("xpath=../preceding-sibling::*[1]").locator("input[type=search]").count()
            assert filters == (1 if lines > 20 else 0)


def drawn(visit: Visit, figure: Any) -> int:
    return int(figure.get_attribute("data-drawn") or 0)


def press_and_wait(visit: Visit, figure: Any, button: Any) -> None:
    before = drawn(visit, figure)
    button.press("Enter")
    visit.page.wait_for_function(
        "([id, before]) => Number(document.getElementById(id).dataset.drawn) > before",
        arg=[figure.get_attribute("id"), before],
    )


def test_axes_switch_between_linear_and_logarithmic(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path) as visit:
        visit.see_all_charts()
        figure = visit.page.locator("figure[id$=-throughput]").last
        labels = figure.locator(".live .role-axis-label text")
        before = labels.all_text_contents()
        button = figure.locator("button.axes")
        assert "0" in labels.all_text_contents()
        assert button.inner_text() == "Logarithmic axes"
        press_and_wait(visit, figure, button)
        assert button.inner_text() == "Linear axes"
        assert "0" not in labels.all_text_contents()
        assert labels.all_text_contents() != before
        press_and_wait(visit, figure, button)
        assert labels.all_text_contents() == before
        assert visit.complaints == []


def test_a_click_into_a_legend_fades_the_other_series(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path) as visit:
        visit.see_all_charts()
        figure = visit.page.locator("figure[id$=-steps]").last
        anchor = figure.get_attribute("id")
        seen = (
            "id => [...document.querySelectorAll(`#${id} .live .role-mark path`)]"
            ".map((one) => one.getAttribute('opacity')).join()"
        )
        before = visit.page.evaluate(seen, anchor)
        figure.locator(".live .role-legend-symbol path").first.click()
        visit.page.wait_for_function(f"([id, before]) => ({seen})(id) !== before", arg=[anchor, before])
        assert visit.complaints == []


@pytest.mark.parametrize("case", ["sample", "large"], indirect=True)
def test_links_lead_to_what_they_name(browser: Any, case: Case) -> None:
    with Visit(browser, case.path) as visit:
        targets = visit.page.eval_on_selector_all("a[href^='#']", "links => links.map((one) => one.hash.slice(1))")
        ids = visit.page.eval_on_selector_all("[id]", "all => all.map((one) => one.id)")
        assert set(targets) <= set(ids)
        sections = visit.page.eval_on_selector_all(
            "main section, main figure, .sheet", "all => all.map((one) => one.id)"
        )
        assert "" not in sections
        assert set(sections) <= set(targets)


def test_a_link_into_something_closed_opens_it(browser: Any, sample: Case) -> None:
    (group, *_) = sample.report.groups
    assert group.missing
    anchor = f"#{group.missing[-1].view}-{group.id}"
    with Visit(browser, sample.path, anchor) as visit:
        place = visit.page.locator(anchor)
        place.wait_for(state="visible")
        assert visit.page.evaluate("scrollY") > 0
        assert visit.complaints == []


SHOWN_ALONE = """wanted => {
    const entries = [...document.querySelectorAll(".side [aria-current]")].map(entry => entry.getAttribute("href"));
    const panels = [...document.querySelectorAll(".panel")].filter(panel => panel.checkVisibility());
    return entries.length === 1 && entries[0] === `#${wanted}`
        && panels.length === 1 && panels[0].dataset.panel === wanted;
}"""
"""Whether panel `wanted` is the only one to be seen and the side bar marks it alone."""


def test_one_group_is_shown_at_a_time(browser: Any, sample: Case) -> None:
    """By links, by keys, and back; a link into something closed of another group opens both."""
    groups = [f"group-{group.id}" for group in sample.report.groups]
    with Visit(browser, sample.path) as visit:

        def shown(wanted: str) -> str:
            """The one panel of the page and its entry in the side bar, once the page came to `wanted`; its anchor.

            One look at the page a try: a link is followed after the click returns.
            """
            visit.page.wait_for_function(SHOWN_ALONE, arg=wanted)
            anchor: str = visit.page.evaluate("location.hash")
            return anchor

        assert shown("overview") == ""
        visit.page.locator(".glance a").first.click()
        assert shown(groups[0]) == f"#{groups[0]}"
        assert visit.page.evaluate("scrollY") == 0
        visit.page.locator(f".side a[href='#{groups[1]}']").press("Enter")
        shown(groups[1])
        visit.page.go_back()
        shown(groups[0])
        visit.page.locator(f".side a[href='#{groups[0]}']").focus()
        for key, wanted in (
            ("ArrowDown", groups[1]),
            ("ArrowUp", groups[0]),
            ("End", "runs-and-methods"),
            ("Home", "overview"),
        ):
            visit.page.keyboard.press(key)
            shown(wanted)
            assert visit.page.evaluate("document.activeElement.hash") == f"#{wanted}"
        closed = visit.page.locator(f"#steps-{sample.report.groups[-1].id} > details")
        assert closed.get_attribute("open") is None
        visit.page.evaluate("anchor => { location.hash = anchor; }", f"steps-{sample.report.groups[-1].id}")
        shown(groups[-1])
        assert closed.get_attribute("open") is not None
        visit.page.evaluate("location.hash = 'data-points'")
        visit.page.wait_for_selector("#data-points", state="visible")
        shown("runs-and-methods")
        assert visit.complaints == []


WORDS = """() => {
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let words = 0;
    while (walk.nextNode()) {
        const at = walk.currentNode.parentElement;
        if (at.closest("script, style, .unseen, .skip") || !at.checkVisibility()) continue;
        const closed = at.closest("details:not([open])");
        if (closed && !at.closest("summary")) continue;
        words += (walk.currentNode.textContent.match(/\\S+/g) ?? []).length;
    }
    return words;
}"""
"""Words that a reader sees, those of charts included."""

MAX_WORDS = 2500


def test_few_words_are_seen_until_somebody_wants_more(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path, viewport={"width": 1400, "height": 900}) as visit:
        for entry in visit.page.locator(".side a").all():
            entry.click()
            assert 20 < visit.page.evaluate(WORDS) <= MAX_WORDS, entry.inner_text()
        notice = "MLPerf-derived workload, not an MLPerf result"
        visit.open_all()
        assert visit.page.locator("body").inner_text().count(notice) == 1


@pytest.mark.parametrize("num_groups", [1, 3, pytest.param(12, marks=pytest.mark.nightly), 40])
def test_first_screen_compares_all_groups(browser: Any, sample: Case, tmp_path: Path, num_groups: int) -> None:
    """One picture against the ideal and each group's answer, whatever their number; a list scrolls by itself."""
    made = sample.report.groups
    groups = tuple(
        replace(made[k % len(made)], id=f"{k:012x}", label=f"group {k}", settings=(("case", str(k)),))
        for k in range(num_groups)
    )
    made_of = document_of(replace(sample.report, groups=groups))
    # What stands below the first screen costs the most time to draw.
    sections = tuple(replace(one, sections=()) if one.is_group else one for one in made_of.sections)
    path = tmp_path / "report.html"
    path.write_text(html.to_html(replace(made_of, sections=sections)), encoding="utf-8")
    with Visit(browser, path, viewport={"width": 1400, "height": 900}) as visit:
        picture = visit.page.locator("#summary figure").bounding_box()
        answers = visit.page.locator("#summary .glances, #summary .glance-list .scroll").bounding_box()
        assert picture["y"] + picture["height"] <= 900
        assert answers["y"] + answers["height"] <= 900
        found = visit.page.locator(".glance, .glance-list tbody tr")
        assert found.count() == num_groups
        assert max(len(one.split()) for one in found.all_inner_texts()) <= 65
        assert [one for one in found.all_inner_texts() if "%" not in one and "No rating: " not in one] == []
        assert visit.complaints == []


SMALLEST = """() => [...document.querySelectorAll("figure")].map((figure) => {
    const svg = [...figure.querySelectorAll("svg")].find((one) => one.checkVisibility());
    const scale = svg.getBoundingClientRect().width / Number(svg.getAttribute("width"));
    const sizes = [...svg.querySelectorAll("text")].map((one) => parseFloat(getComputedStyle(one).fontSize));
    return scale * Math.min(...sizes);
})"""


def test_text_of_charts_stays_readable_on_a_telephone(browser: Any, sample: Case) -> None:
    """At least 10 pixels, with scripts and without."""
    for has_scripts in (True, False):
        with Visit(
            browser, sample.path, viewport={"width": 420, "height": 900}, java_script_enabled=has_scripts
        ) as visit:
            if has_scripts:
                visit.see_all_charts()
                assert min(visit.page.evaluate(SMALLEST)) >= 10
            else:
                box = visit.page.locator("#summary .still svg").bounding_box()
                assert box["width"] >= 0.9 * float(visit.page.locator("#summary .still svg").get_attribute("width"))
                still = visit.page.locator("figure[id$=-waterfall] .still svg").first
                assert float(still.get_attribute("width")) <= 400


REACH = """(figure) => {
    const box = figure.getBoundingClientRect();
    const marks = figure.querySelectorAll(".live svg text, .live svg .role-mark path, .live svg .role-mark line");
    return [...marks].filter((one) => one.textContent || one.tagName !== "text").map((one) => {
        const own = one.getBoundingClientRect();
        return { what: one.textContent || one.tagName, left: own.left - box.left, right: box.right - own.right };
    });
}"""
"""Texts and marks of a chart, and how far within its frame they end, pixels."""


OVER_RANKS = ("efficiency", "throughput", "speedup")


@pytest.mark.parametrize("width", [420, 1400])
def test_waterfall_and_scaling_stand_whole_in_the_window(browser: Any, scattered: Case, width: int) -> None:
    """Every bar, interval and label; on a desk the waterfall is as wide as its section, and text has its size."""
    with Visit(browser, scattered.path, viewport={"width": width, "height": 900}) as visit:
        visit.see_all_charts()
        figures = {name: visit.page.locator(f"figure[id$=-{name}]").last for name in ("waterfall", *OVER_RANKS)}
        for name, figure in (*figures.items(), ("overview", visit.page.locator("#summary figure"))):
            reach = figure.evaluate(REACH)
            assert len(reach) > 5
            assert [one for one in reach if min(one["left"], one["right"]) < -1] == [], name
            assert figure.bounding_box()["x"] >= 0
        drawn = visit.page.locator("figure[id$=-waterfall] .live svg").bounding_box()
        assert drawn["width"] >= 0.9 * visit.page.locator("section[id^=causes-]").bounding_box()["width"]
        assert min(visit.page.evaluate(SMALLEST)) >= 10


def test_scaling_charts_draw_intervals(browser: Any, scattered: Case) -> None:
    """As long as the table says: at two ranks in all three charts, of the throughput at one rank as well."""
    (group,) = scattered.report.groups
    with Visit(browser, scattered.path) as visit:
        visit.see_all_charts()
        for name, count in (("efficiency", 1), ("throughput", 2), ("speedup", 1)):
            figure = visit.page.locator(f"figure[id='chart-{group.id}-{name}']")
            heights = [
                box["height"]
                for bar in figure.locator(".live svg .mark-rule.role-mark line").all()
                if (box := bar.bounding_box()) and box["height"] > 1
            ]
            assert len(heights) == count, name
            shown = getattr(group.largest, name)
            ratio = (shown.high - shown.low) / shown.high
            assert max(heights) == pytest.approx(ratio * 200 / 1.12, rel=0.5)


WRAPPED = """() => [...document.querySelectorAll("main th, main td")].filter((cell) => cell.getClientRects().length)
    .map((cell) => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top / 8)));
        return { text: cell.innerText.trim(), words: cell.innerText.trim().split(/\\s+/).length, lines: lines.size };
    })
    .filter((one) => one.words > 4 && 2 * one.lines > one.words + 2)"""
"""Cells of five words or more with hardly two in a line."""


@pytest.mark.parametrize("case", ["sample", "large"], indirect=True)
def test_no_table_has_a_word_a_line_on_a_telephone(browser: Any, case: Case) -> None:
    with Visit(browser, case.path, viewport={"width": 420, "height": 900}) as visit:
        visit.open_all()
        assert visit.page.evaluate(WRAPPED) == []


def test_tabs_are_whole_on_a_telephone(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path, viewport={"width": 420, "height": 900}) as visit:
        side = visit.page.locator(".side")
        assert side.evaluate("one => one.scrollHeight - one.clientHeight") <= 1
        for entry in side.locator("a").all():
            box = entry.bounding_box()
            assert box["x"] >= 0, entry.inner_text()
            assert box["x"] + box["width"] <= 420, entry.inner_text()


def test_tables_and_charts_are_saved_as_files(browser: Any, sample: Case) -> None:
    def saved(visit: Visit, button: Any) -> tuple[str, str]:
        with visit.page.expect_download() as found:
            button.press("Enter")
        return found.value.suggested_filename, Path(found.value.path()).read_text(encoding="utf-8")

    with Visit(browser, sample.path) as visit:
        visit.see_all_charts()
        figure = visit.page.locator("figure[id$=-efficiency]").last
        name, content = saved(visit, figure.get_by_role("button", name="CSV of the chart"))
        assert name == f"dlbench-{figure.get_attribute('id')}.csv"
        weak = sample.report.groups[-1]
        assert content.splitlines()[0].startswith("At,")
        assert wording.value_text(weak.largest.efficiency) in content
        name, content = saved(visit, figure.get_by_role("button", name="SVG of the chart"))
        assert name.endswith(".svg")
        assert content.startswith("<svg")
        assert 'xmlns="http://www.w3.org/2000/svg"' in content
        # The raw numbers of a table are the file that the command writes.
        name, content = saved(visit, visit.page.locator("a.raw[href='#data-step-quantiles']").first)
        assert name == "dlbench-step-quantiles.csv"
        assert content.splitlines()[0].startswith("group,label,")
        assert visit.complaints == []


# Paper


@pytest.mark.parametrize(
    "case", ["sample", *(pytest.param(case, marks=pytest.mark.nightly) for case in ("large", "real"))], indirect=True
)
def test_page_prints_its_numbers(browser: Any, case: Case, tmp_path: Path) -> None:
    """Everything closed is open on paper, switches are not there, and the text of the PDF holds the figures."""
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    with Visit(browser, case.path) as visit:
        visit.see_all_charts()
        visit.page.evaluate("location.hash = 'overview'")
        visit.page.wait_for_function("() => document.querySelectorAll('.panel:not([hidden])').length === 1")
        closed = visit.page.locator("main details:not([open])").count()
        path = tmp_path / "report.pdf"
        path.write_bytes(visit.page.pdf(format="A4"))
        assert visit.page.locator("main details:not([open])").count() == closed
        visit.page.emulate_media(media="print")
        assert visit.page.locator(".chart .live:visible, .tools:visible, .side:visible").count() == 0
        assert visit.page.locator(".chart .still svg:visible").count() == visit.page.locator("figure").count()
        assert visit.complaints == []
    text = " ".join(" ".join(page.extract_text() for page in pypdf.PdfReader(path).pages).split())
    for group in case.report.groups:
        for point in group.points:
            assert wording.value_text(point.throughput) in text.replace("\N{NO-BREAK SPACE}", " ")
            assert wording.value_text(point.efficiency) in text.replace("\N{NO-BREAK SPACE}", " ")


# Foreign text


def test_foreign_text_stays_text(browser: Any, hostile: Case) -> None:
    with Visit(browser, hostile.path) as visit:
        visit.see_all_charts()
        visit.open_all()
        for button in visit.page.locator("button.axes").all()[:6]:
            press_and_wait(visit, button.locator("xpath=ancestor::figure[1]"), button)
        assert visit.page.evaluate("window.pwned") is None
        assert visit.page.locator("main img, main script, svg script, svg foreignObject").count() == 0
        assert PAYLOAD in visit.page.locator("main").inner_text()
        assert visit.requests == [hostile.path.as_uri()]
        # Vega warns of a chart with every series off, and of a logarithmic axis that was to begin at zero.
        assert [text for text in visit.complaints if not text.startswith("WARN ")] == []


def test_markdown_of_foreign_text_holds_no_markup(browser: Any, hostile: Case, tmp_path: Path) -> None:
    """As GitHub would show it: Markdown made HTML by a common reader runs nothing and links nowhere."""
    reader = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    from dlbench.report.formats.markdown import to_markdown

    path = tmp_path / "report.html"
    made = (
        reader.MarkdownIt("commonmark", {"html": True}).enable("table").render(to_markdown(document_of(hostile.report)))
    )
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8><link rel=icon href='data:,'>{made}", encoding="utf-8")
    with Visit(browser, path) as visit:
        visit.page.wait_for_timeout(200)
        assert visit.page.evaluate("window.pwned") is None
        assert visit.page.locator("img, script, svg, a").count() == 0
        assert PAYLOAD in visit.page.locator("body").inner_text()
        assert visit.requests == [path.as_uri()]


def test_command_writes_the_page_of_hostile_runs(hostile: Case, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = CliRunner().invoke(command_line, ["report", str(hostile.path.parent / "runs"), "-o", str(out)])
    assert done.exit_code == 4  # one run is damaged on purpose
    specs = out.read_text(encoding="utf-8").partition('id="chart-specs">')[2].partition("</script>")[0]
    assert json.loads(specs)["charts"]


# Size


def test_many_groups_load_quickly_enough_to_read(browser: Any, tmp_path: Path) -> None:
    """Sixty groups: the first in full, the others in a line each, and the browser opens the page all the same."""
    write_scaling(tmp_path / "runs", repeats=1)
    made = assemble(scan(tmp_path / "runs"))
    groups = tuple(replace(group, id=f"{group.id}{k:03d}") for k in range(60) for group in made.groups)
    path = tmp_path / "report.html"
    path.write_text(html.to_html(document_of(replace(made, groups=groups))), encoding="utf-8")
    assert path.stat().st_size < 5_000_000
    with Visit(browser, path) as visit:
        assert visit.page.locator("section.group").count() == html.MAX_GROUPS
        assert visit.page.locator("#further-groups tbody tr").count() == 60 - html.MAX_GROUPS
        assert visit.complaints == []
