"""The page in a real browser: one page of made runs on a desk, on a telephone, by keyboard, in print; a hostile one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlbench.records.scan import scan
from dlbench.report import wording
from dlbench.report.formats import html
from dlbench.report.formats.markdown import to_markdown
from dlbench.views.scaling_report import assemble, document_of, scaling_views
from tests.report.test_report import write_sample
from tests.support.browser import Visit, violations
from tests.support.foreign_text import PAYLOAD, write_hostile
from tests.support.run_factory import constant, plans, write_run

pytestmark = pytest.mark.browser

DESK: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
TELEPHONE: dict[str, Any] = {"viewport": {"width": 420, "height": 900}}
NOTICE = "MLPerf-derived workload, not an MLPerf result"


class Case:
    def __init__(self, runs: Path, folder: Path) -> None:
        self.report = assemble(scan(runs))
        self.path = folder / "report.html"
        self.path.write_text(html.to_html(document_of(self.report)), encoding="utf-8")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Several groups; one loses a fifth on 1, 2, 4 and 8 nodes, so that there is a projection to draw."""
    folder = tmp_path_factory.mktemp("sample")
    write_sample(folder / "runs")
    nodes = {"system": "box", "points_are": "nodes", "ranks_per_node": 1, "launcher": "mpirun"}
    for plan in plans(points=(1, 2, 4, 8), series="law", overrides={"train.batch_per_rank": 2}, **nodes):
        k = plan.layout.ranks
        step = 100 * (1 + 0.2 * (1 - 1 / k)) * (1 + plan.series.repeat * (2 + k) % 5 / 100)
        write_run(folder / "runs", plan, constant([0, 0, 40, 50, max(0.0, step - 100), 10]))
    return Case(folder / "runs", folder)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("hostile")
    write_hostile(folder / "runs")
    return Case(folder / "runs", folder)


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

SHOWN_ALONE = """wanted => {
    const entries = [...document.querySelectorAll(".side [aria-current]")].map(entry => entry.getAttribute("href"));
    const panels = [...document.querySelectorAll(".panel")].filter(panel => panel.checkVisibility());
    return entries.length === 1 && entries[0] === `#${wanted}`
        && panels.length === 1 && panels[0].dataset.panel === wanted;
}"""
"""Whether panel `wanted` is the only one to be seen and the side bar marks it alone."""

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

SMALLEST = """() => [...document.querySelectorAll("figure")].map((figure) => {
    const svg = [...figure.querySelectorAll("svg")].find((one) => one.checkVisibility());
    const scale = svg.getBoundingClientRect().width / Number(svg.getAttribute("width"));
    const sizes = [...svg.querySelectorAll("text")].map((one) => parseFloat(getComputedStyle(one).fontSize));
    return scale * Math.min(...sizes);
})"""

REACH = """(figure) => {
    const box = figure.getBoundingClientRect();
    const marks = figure.querySelectorAll(".live svg text, .live svg .role-mark path, .live svg .role-mark line");
    return [...marks].filter((one) => one.textContent || one.tagName !== "text").map((one) => {
        const own = one.getBoundingClientRect();
        return { what: one.textContent || one.tagName, left: own.left - box.left, right: box.right - own.right };
    });
}"""
"""Texts and marks of a chart, and how far within its frame they end, pixels."""

WRAPPED = """() => [...document.querySelectorAll("main th, main td")].filter((cell) => cell.getClientRects().length)
    .map((cell) => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top / 8)));
        return { text: cell.innerText.trim(), words: cell.innerText.trim().split(/\\s+/).length, lines: lines.size };
    })
    .filter((one) => one.words > 4 && 2 * one.lines > one.words + 2)"""
"""Cells of five words or more with hardly two in a line."""


MAX_WORDS = 2500


def turn_axes(visit: Visit, figure: Any) -> None:
    before = int(figure.get_attribute("data-drawn") or 0)
    figure.locator("button.axes").press("Enter")
    visit.page.wait_for_function(
        "([id, before]) => Number(document.getElementById(id).dataset.drawn) > before",
        arg=[figure.get_attribute("id"), before],
    )


def test_on_a_desk_charts_answer_and_every_view_says_something(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path, **DESK) as visit:
        page = visit.page
        for entry in page.locator(".side a").all():
            entry.click()
            assert 20 < page.evaluate(WORDS) <= MAX_WORDS, entry.inner_text()
        visit.see_all_charts()
        assert page.locator("body").inner_text().count(NOTICE) == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400
        assert min(page.evaluate(SMALLEST)) >= 10
        point = page.locator("[id^=scaling] .live svg .mark-symbol.role-mark path").last
        point.scroll_into_view_if_needed()
        point.hover()
        page.wait_for_selector("#vg-tooltip-element.visible")
        assert "ranks" in page.locator("#vg-tooltip-element").inner_text()
        for name in ("waterfall", "efficiency", "throughput", "speedup"):
            reach = page.locator(f"figure[id$=-{name}]").last.evaluate(REACH)
            assert len(reach) > 5
            assert [one for one in reach if min(one["left"], one["right"]) < -1] == [], name
        figure = page.locator("figure[id$=-throughput]").last
        labels = figure.locator(".live .role-axis-label text")
        before = labels.all_text_contents()
        assert "0" in before
        turn_axes(visit, figure)
        assert "0" not in labels.all_text_contents()
        turn_axes(visit, figure)
        assert labels.all_text_contents() == before
        numbers = json.loads(page.locator("#chart-specs").text_content())["tables"]
        for group in sample.report.groups:
            for view in scaling_views().group:
                place = page.locator(f"[id='{view.id}-{group.id}']")
                if view.section(group) is not None:
                    assert place.locator("table, svg").count() or len(place.text_content()) > 60, view.id
                    for one in place.locator("figure").all():
                        assert one.locator(".still svg").count() == 1
                        assert numbers.get(one.get_attribute("id")) or one.locator("table tbody tr").count(), view.id
                elif view.remedy(group):
                    assert len(place.text_content()) > len(view.title) + 20, view.id
        assert visit.requests == [sample.path.as_uri()]
        assert visit.complaints == []


def test_on_a_telephone_nothing_is_cut_or_too_small(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path, **TELEPHONE) as visit:
        side = visit.page.locator(".side")
        assert side.evaluate("one => one.scrollHeight - one.clientHeight") <= 1
        for entry in side.locator("a").all():
            box = entry.bounding_box()
            assert 0 <= box["x"] <= box["x"] + box["width"] <= 420, entry.inner_text()
        visit.see_all_charts()
        assert min(visit.page.evaluate(SMALLEST)) >= 10
        assert visit.page.evaluate(WRAPPED) == []
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 420
        reach = visit.page.locator("figure[id$=-waterfall]").last.evaluate(REACH)
        assert [one for one in reach if min(one["left"], one["right"]) < -1] == []


def test_page_reads_without_scripts(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path, java_script_enabled=False, **TELEPHONE) as visit:
        stills = visit.page.locator(".still svg")
        assert stills.count() == visit.page.locator("figure").count() >= 5
        shown = [still.bounding_box() for still in stills.all() if still.is_visible()]
        assert len(shown) >= 3
        assert all(box["height"] > 40 for box in shown)
        assert float(visit.page.locator("figure[id$=-waterfall] .still svg").first.get_attribute("width")) <= 400
        assert visit.page.get_by_text(NOTICE, exact=True).first.is_visible()
        # All groups stand below each other; what is closed opens by itself.
        assert all(group.is_visible() for group in visit.page.locator("section.group").all())
        for place, wanted in (("#runs", "#table-runs table"), ("#data", "#data-points a[download]")):
            assert not visit.page.locator(wanted).is_visible()
            visit.page.locator(f"{place} > summary, {place} > details > summary").click()
            assert visit.page.locator(wanted).is_visible()
        assert visit.requests == [sample.path.as_uri()]


@pytest.mark.parametrize(("scheme", "width"), [("light", 320), ("dark", 1280)])
def test_axe_finds_nothing_and_text_has_contrast(browser: Any, sample: Case, scheme: str, width: int) -> None:
    """Contrast against the page of at least 4.5 (WCAG 2.2, 1.4.3), in the axes and legends of charts as well."""
    context = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "bypass_csp": True}
    with Visit(browser, sample.path, **context) as visit:
        visit.see_all_charts()
        assert violations(visit) == []
        assert visit.page.evaluate(CONTRAST) == []
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


def test_one_group_is_shown_at_a_time_by_links_and_keys(browser: Any, sample: Case) -> None:
    groups = [f"group-{group.id}" for group in sample.report.groups]
    last = sample.report.groups[-1].id
    with Visit(browser, sample.path) as visit:
        page = visit.page

        def shown(wanted: str) -> None:
            """Waits until one panel alone is seen, and marked in the side bar: a link is followed after the click."""
            page.wait_for_function(SHOWN_ALONE, arg=wanted)

        shown("overview")
        page.locator(".glance a").first.click()
        shown(groups[0])
        assert page.evaluate("scrollY") == 0
        page.locator(f".side a[href='#{groups[1]}']").press("Enter")
        shown(groups[1])
        page.go_back()
        shown(groups[0])
        page.locator(f".side a[href='#{groups[0]}']").focus()
        keys = {"ArrowDown": groups[1], "ArrowUp": groups[0], "End": "runs-and-methods", "Home": "overview"}
        for key, wanted in keys.items():
            page.keyboard.press(key)
            shown(wanted)
            assert page.evaluate("document.activeElement.hash") == f"#{wanted}"
        # A link into something closed of another group opens both.
        closed = page.locator(f"#steps-{last} > details")
        assert closed.get_attribute("open") is None
        page.evaluate("anchor => { location.hash = anchor; }", f"steps-{last}")
        shown(groups[-1])
        assert closed.get_attribute("open") is not None
        targets = page.eval_on_selector_all("a[href^='#']", "links => links.map((one) => one.hash.slice(1))")
        assert set(targets) <= set(page.eval_on_selector_all("[id]", "all => all.map((one) => one.id)"))
        chooser = page.get_by_role("button", name="Colours")
        colours = []
        for _ in range(4):
            colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            chooser.press("Enter")
        assert colours[0] == colours[1] == colours[3] != colours[2]
        assert visit.complaints == []


def test_tables_sort_by_value_and_filter_by_keyboard(browser: Any, sample: Case) -> None:
    with Visit(browser, sample.path, "#table-runs") as visit:
        button = visit.page.locator("#table-runs table").get_by_role("button", name="Samples/s")
        rows = visit.page.locator("#table-runs tbody tr")
        titles = visit.page.locator("#table-runs thead th").all_text_contents()
        # The first cell of a row is its header.
        place = next(index for index, title in enumerate(titles) if "Samples/s" in title) - 1
        for order, pick in (("ascending", min), ("descending", max)):
            button.press("Enter")
            assert visit.page.locator(f"#table-runs th[aria-sort={order}]").count() == 1
            values = [row.locator("td").nth(place).get_attribute("data-value") for row in rows.all()]
            known = [float(value) for value in values if value]
            assert known[0] == pick(known)
            # Runs without figures come last either way.
            assert values[-1] == ""
        visit.page.locator("#table-runs").get_by_label("Show lines with:").fill("failed")
        assert visit.page.locator("#table-runs tbody tr:visible").count() == 1
        assert visit.page.get_by_role("status").filter(has_text="1 of").count() == 1
        # Text with units sorts by what it means: 5 ms before 40 ms, 850 µs before 2 ms; a sum stays at the end.
        visit.open_all()
        table = visit.page.locator("[id^=table-parts-] table").last
        table.locator("thead button").nth(1).press("Enter")
        cells = [row.locator("td").first.inner_text() for row in table.locator("tbody tr:not(.of)").all()]
        names = [row.locator("th").inner_text() for row in table.locator("tbody tr").all()]
        assert names[-1].startswith("sum")
        units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
        times = [float(text.split()[0]) * units[text.split()[1].split("[")[0]] for text in cells[:-1]]
        assert times == sorted(times)
        for one in visit.page.locator("main table").all():
            filters = one.locator("xpath=../preceding-sibling::*[1]").locator("input[type=search]").count()
            assert filters == (1 if one.locator("tbody tr").count() > 20 else 0)
        assert visit.complaints == []


def test_tables_and_charts_are_saved_as_files_and_printed_whole(browser: Any, sample: Case, tmp_path: Path) -> None:
    """Everything closed is open on paper, switches are not there, and the text of the PDF holds the figures."""
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")

    def saved(visit: Visit, button: Any) -> tuple[str, str]:
        with visit.page.expect_download() as download:
            button.press("Enter")
        return download.value.suggested_filename, Path(download.value.path()).read_text(encoding="utf-8")

    path = tmp_path / "report.pdf"
    with Visit(browser, sample.path) as visit:
        visit.see_all_charts()
        figure = visit.page.locator("figure[id$=-efficiency]").last
        name, content = saved(visit, figure.get_by_role("button", name="CSV of the chart"))
        assert name == f"dlbench-{figure.get_attribute('id')}.csv"
        assert wording.value_text(sample.report.groups[-1].largest.efficiency) in content
        name, content = saved(visit, figure.get_by_role("button", name="SVG of the chart"))
        assert (name[-4:], content[:4]) == (".svg", "<svg")
        # The raw numbers of a table are the file that the command writes.
        name, content = saved(visit, visit.page.locator("a.raw[href='#data-step-quantiles']").first)
        assert name == "dlbench-step-quantiles.csv"
        assert content.startswith("group,label,")
        visit.page.evaluate("location.hash = 'overview'")
        visit.page.wait_for_function("() => document.querySelectorAll('.panel:not([hidden])').length === 1")
        path.write_bytes(visit.page.pdf(format="A4"))
        visit.page.emulate_media(media="print")
        assert visit.page.locator(".chart .live:visible, .tools:visible, .side:visible").count() == 0
        assert visit.page.locator(".chart .still svg:visible").count() == visit.page.locator("figure").count()
        assert visit.complaints == []
    text = " ".join(" ".join(page.extract_text() for page in pypdf.PdfReader(path).pages).split())
    for group in sample.report.groups:
        for point in group.points:
            assert wording.value_text(point.throughput) in text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("num_groups", [3, 60])
def test_first_screen_compares_all_groups(browser: Any, sample: Case, tmp_path: Path, num_groups: int) -> None:
    """One picture against the ideal and each group's answer, whatever their number; a list scrolls by itself."""
    made = sample.report.groups
    groups = tuple(
        replace(made[k % len(made)], id=f"{k:012x}", label=f"group {k}", settings=(("case", str(k)),))
        for k in range(num_groups)
    )
    document = document_of(replace(sample.report, groups=groups))
    # What stands below the first screen costs the most time to draw.
    sections = tuple(replace(one, sections=()) if one.is_group else one for one in document.sections)
    path = tmp_path / "report.html"
    path.write_text(html.to_html(replace(document, sections=sections)), encoding="utf-8")
    assert path.stat().st_size < 5_000_000
    with Visit(browser, path, **DESK) as visit:
        picture = visit.page.locator("#summary figure").bounding_box()
        answers = visit.page.locator("#summary .glances, #summary .glance-list .scroll").bounding_box()
        assert max(box["y"] + box["height"] for box in (picture, answers)) <= 900
        glances = visit.page.locator(".glance, .glance-list tbody tr").all_inner_texts()
        assert len(glances) == num_groups
        assert [one for one in glances if "%" not in one and "No rating: " not in one] == []
        assert visit.page.locator("section.group").count() == min(num_groups, html.MAX_GROUPS)
        assert visit.complaints == []


def test_foreign_text_runs_nothing(browser: Any, hostile: Case, tmp_path: Path) -> None:
    """On the page, and in its Markdown as a common reader shows it."""
    reader = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    with Visit(browser, hostile.path) as visit:
        visit.see_all_charts()
        for button in visit.page.locator("button.axes").all()[:3]:
            turn_axes(visit, button.locator("xpath=ancestor::figure[1]"))
        assert visit.page.evaluate("window.pwned") is None
        assert visit.page.locator("main img, main script, svg script, svg foreignObject").count() == 0
        assert PAYLOAD in visit.page.locator("main").inner_text()
        assert visit.requests == [hostile.path.as_uri()]
        # Vega warns of a chart with every series off, and of a logarithmic axis that was to begin at zero.
        assert [text for text in visit.complaints if not text.startswith("WARN ")] == []
    path = tmp_path / "report.html"
    shown = reader.MarkdownIt("commonmark", {"html": True}).enable("table")
    made = shown.render(to_markdown(document_of(hostile.report)))
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8><link rel=icon href='data:,'>{made}", encoding="utf-8")
    with Visit(browser, path) as visit:
        visit.page.wait_for_timeout(200)
        assert visit.page.evaluate("window.pwned") is None
        assert visit.page.locator("img, script, svg, a").count() == 0
        assert visit.requests == [path.as_uri()]
