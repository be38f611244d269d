"""Views: subjects that compute numbers and show them as sections of a page, and the order in which they stand on it.

A report about groups of runs is made of views. Each is a class of its own module, derived from `GroupView` (shown for
each group) or `ReportView` (shown once), and says by `after` where it stands. `collect` finds them in a package, so
that a new view is a new module and no further line: `dlbench.views.history` is the shortest.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, TypeVar, get_type_hints

from dlbench.report.document import Level, Missing, Section
from dlbench.report.formats.json import schema_of
from dlbench.report.table import NamedTable, Sheet, named_table

N = TypeVar("N")
V = TypeVar("V", bound="View")
S = TypeVar("S")

START = "start"  # What the first view of a page, and the first of a group, stand behind.
GROUPS = "groups"  # What the first view behind all groups stands behind.

_DEPTH: Mapping[Level, int] = {"answer": 0, "evidence": 1, "appendix": 2}


class HasViews:
    """Holds what each view found out, by its key; None (or nothing) where a view has nothing to say."""

    views: Mapping[str, object]

    def of(self, kind: type[N]) -> N | None:
        """Returns the numbers of one view, by their type; None where it has nothing to say."""
        return next((numbers for numbers in self.views.values() if isinstance(numbers, kind)), None)

    def all_of(self, kind: type[N]) -> tuple[N, ...]:
        """Returns the numbers of a view that are a tuple, by the type of its items; empty where there are none."""
        tuples = (numbers for numbers in self.views.values() if isinstance(numbers, tuple))
        return next((numbers for numbers in tuples if numbers and isinstance(numbers[0], kind)), ())


class View:
    """A subject of a report."""

    id: ClassVar[str]  # Stable: the anchor in the page, the start of the names of its tables.
    title: ClassVar[str]
    level: ClassVar[Level] = "evidence"
    key: ClassVar[str] = ""  # Field of a group, or of the report, in its JSON; empty: it has no numbers of its own.
    after: ClassVar[str]
    """Id of the view behind which it stands on the page that `collect` makes, or `START`, or `GROUPS`. A class that
    does not say it itself stands on no such page."""

    def numbers(self, source: Any) -> object:
        """Computes what it has to say, as dataclasses; None (or empty) where these runs give nothing."""
        return None

    def shown(self, owner: Any, numbers: Any) -> Section | None:
        """Returns what people read of its numbers, of a group or a report; None: nothing. Id and title are the view's
        own where the section has none.
        """
        raise NotImplementedError

    def always(self) -> tuple[Sheet[Any], ...]:
        """Returns empty sheets whose tables every report has for programs, if only with a header."""
        return ()

    def remedy(self, owner: Any) -> str:
        """Says in a sentence what would produce the data where there is no section; empty: not worth a line."""
        return ""

    def _shown_of(self, owner: HasViews) -> Section | None:
        numbers = owner.views.get(self.key)
        section = self.shown(owner, numbers) if numbers else None
        if section is None:
            return None
        return replace(section, id=section.id or self.id, title=section.title or self.title)

    def _levelled(self, section: Section) -> Section:
        """Returns the section at the view's level; one that answers what was asked stays an answer."""
        return section if section.level == "answer" else replace(section, level=self.level)


class GroupView(View):
    """A subject that is shown for each group."""

    def section(self, group: Any) -> Section | None:
        """Returns what people read of a group; None where there is nothing. Its id becomes unique by the group's."""
        return self._shown_of(group)


class ReportView(View):
    """A subject that is shown once, about all groups."""

    def sections(self, report: Any) -> tuple[Section, ...]:
        """Returns what people read; empty where there is nothing."""
        section = self._shown_of(report)
        return () if section is None else (section,)


@dataclass(frozen=True, kw_only=True)
class Views:
    """The views of one kind of report, in the order of its page."""

    opening: tuple[ReportView, ...] = ()
    group: tuple[GroupView, ...] = ()
    closing: tuple[ReportView, ...] = ()

    @property
    def report(self) -> tuple[ReportView, ...]:
        return (*self.opening, *self.closing)

    def with_group_numbers(self, source: S) -> S:
        """Returns the source of a group (a dataclass with `views`) with the numbers of all views; each view sees those
        of the views before it.
        """
        found: Any = source
        for view in self.group:
            if view.key:
                found = replace(found, views={**found.views, view.key: view.numbers(found)})
        made: S = found
        return made

    def report_numbers(self, source: Any) -> dict[str, object]:
        """Returns the numbers of the views of the whole report, by their keys."""
        return {view.key: view.numbers(source) for view in self.report if view.key}

    def opening_sections(self, report: Any) -> list[Section]:
        """Returns the sections in front of the groups: what was asked for comes before the summary of its runs."""
        sections = _levelled_sections(self.opening, report)
        return sorted(sections, key=lambda section: section.level != "answer")

    def group_sections(self, group: Any) -> list[Section]:
        """Returns the sections of one group, answers before evidence; ids end with that of the group."""
        sections: list[Section] = []
        for view in self.group:
            section = view.section(group)
            if section is not None:
                sections.append(replace(view._levelled(section), id=f"{section.id}-{group.id}"))
        return sorted(sections, key=lambda section: _DEPTH[section.level])

    def closing_sections(self, report: Any) -> list[Section]:
        """Returns the sections behind the groups."""
        return _levelled_sections(self.closing, report)

    def missing_of_group(self, group: Any) -> tuple[Missing, ...]:
        """Returns the views without a section for a group, with what would produce it."""
        return _missing([view for view in self.group if view.section(group) is None], group)

    def missing_of_report(self, report: Any) -> tuple[Missing, ...]:
        """Returns the views without a section for the whole report, with what would produce it."""
        return _missing([view for view in self.report if not view.sections(report)], report)

    def always(self, group_columns: Sequence[str]) -> tuple[NamedTable, ...]:
        """Returns the tables that every report has for programs; `group_columns` stand in front of those of groups."""
        owners: tuple[tuple[Sequence[str], Sequence[View]], ...] = ((group_columns, self.group), ((), self.report))
        return tuple(
            named_table(sheet.name, sheet.title, sheet.columns, columns)
            for columns, views in owners
            for view in views
            for sheet in view.always()
        )

    def schema(self, report_type: type, group_type: type) -> dict[str, Any]:
        """Returns the JSON schema of a report made of these views; each says by the type of `numbers` what it adds."""
        owners: tuple[tuple[type, Sequence[View]], ...] = ((group_type, self.group), (report_type, self.report))
        inline: dict[type, dict[str, Any]] = {}
        for owner, views in owners:
            inline[owner] = {view.key: get_type_hints(type(view).numbers)["return"] for view in views if view.key}
        return schema_of(report_type, inline)


def _levelled_sections(views: Sequence[ReportView], report: Any) -> list[Section]:
    return [view._levelled(section) for view in views for section in view.sections(report)]


def _missing(silent: Sequence[View], owner: Any) -> tuple[Missing, ...]:
    texts = [(view, view.remedy(owner)) for view in silent]
    return tuple(Missing(view=view.id, title=view.title, text=text) for view, text in texts if text)


def collect(package: ModuleType) -> Views:
    """Imports all modules of a package and returns the views that say in their own class where they stand.

    Raises `ValueError`: two views have one id, or a view stands behind one that does not exist.
    """
    group: list[GroupView] = []
    report: list[ReportView] = []
    for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(module_info.name)
        for kind in vars(module).values():
            is_view = isinstance(kind, type) and issubclass(kind, View) and kind.__module__ == module_info.name
            if not is_view or "after" not in vars(kind):
                continue
            if issubclass(kind, GroupView):
                group.append(kind())
            else:
                report.append(kind())
    opening, closing = in_order(report, START, GROUPS)
    (of_group,) = in_order(group, START)
    return Views(opening=opening, group=of_group, closing=closing)


def in_order(views: Sequence[V], *starts: str) -> tuple[tuple[V, ...], ...]:
    """Returns the views behind each start, every view behind the one that it names.

    Of several behind one view those come first that fewer follow, so that a new one stands directly behind it.

    Raises `ValueError`: two views have one id, or one stands behind a view that does not exist or stands behind it.
    """
    followers: dict[str, list[V]] = {}
    for view in views:
        followers.setdefault(view.after, []).append(view)

    def behind(name: str) -> list[V]:
        chains = [[view, *behind(view.id)] for view in followers.get(name, [])]
        chains.sort(key=lambda chain: (len(chain), chain[0].id))
        return [view for chain in chains for view in chain]

    ids = {view.id for view in views}
    if len(ids) < len(views):
        raise ValueError(f"views {', '.join(sorted(view.id for view in views))}: two have one id")
    ordered = tuple(tuple(behind(start)) for start in starts)
    lost = [view for view in views if not any(view in chain for chain in ordered)]
    if lost:
        raise ValueError(f"view {lost[0].id}: stands behind {lost[0].after!r}, which is not on the page")
    return ordered
