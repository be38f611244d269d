"""Views: subjects of a report. A new view is a new module: its class says by `after` where it stands."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast, get_type_hints

from dlbench.report.document import Level, Missing, Section
from dlbench.report.formats.data import schema_of
from dlbench.report.table import NamedTable, Sheet, named_table

N = TypeVar("N")
V = TypeVar("V", bound="View")
S = TypeVar("S")

START = "start"  # `after` of the first view of a page, and of the first of a group.
GROUPS = "groups"  # `after` of the first view behind all groups.

_DEPTH: Mapping[Level, int] = {"answer": 0, "evidence": 1, "appendix": 2}


class HasViews:
    """Holds the numbers of each view, by its key; None or empty if a view has none."""

    views: Mapping[str, object]

    def of(self, kind: type[N]) -> N | None:
        """Returns the numbers of one view, by their type; None if it has none."""
        return next((numbers for numbers in self.views.values() if isinstance(numbers, kind)), None)

    def all_of(self, kind: type[N]) -> tuple[N, ...]:
        """Returns the numbers of a view that are a tuple, by the type of its items; empty if there are none."""
        for numbers in self.views.values():
            if isinstance(numbers, tuple) and numbers and isinstance(numbers[0], kind):
                return numbers
        return ()


class View:
    """A subject of a report."""

    id: ClassVar[str]  # Stable: the anchor in the page, the start of the names of its tables.
    title: ClassVar[str]
    level: ClassVar[Level] = "evidence"
    key: ClassVar[str] = ""  # Field of a group, or of the report, in its JSON; empty: it has no numbers of its own.
    lack: ClassVar[str] = ""  # The sentence of `remedy` if it is the same for all runs.
    after: ClassVar[str]  # Id of the view before it, `START` or `GROUPS`; without it a class is on no page.

    def numbers(self, source: Any) -> object:
        """Computes the numbers, as dataclasses; None or empty if these runs give none."""
        return None

    def shown(self, owner: Any, numbers: Any) -> Section | None:
        """Returns the section of the numbers, None for none; id and title are by default those of the view."""
        raise NotImplementedError

    def always(self) -> tuple[Sheet[Any], ...]:
        """Returns empty sheets: tables for programs that every report has, possibly with a header alone."""
        return ()

    def remedy(self, owner: Any) -> str:
        """Says in a sentence what would produce the data of a missing section; empty: not worth a line."""
        return self.lack

    @property
    def has_remedy(self) -> bool:
        """Returns whether `remedy` is more than the empty default: only then a section must be tried for it."""
        return self.lack != "" or type(self).remedy is not View.remedy

    def _shown_of(self, owner: HasViews) -> Section | None:
        numbers = owner.views.get(self.key)
        if not numbers:
            return None
        section = self.shown(owner, numbers)
        if section is None:
            return None
        return replace(section, id=section.id or self.id, title=section.title or self.title)

    def _levelled(self, section: Section) -> Section:
        if section.level == "answer":
            return section
        return replace(section, level=self.level)


class GroupView(View):
    """A subject that is shown for each group."""

    def section(self, group: Any) -> Section | None:
        """Returns the section of a group; None if there is none. `Views` adds the group's id to its id."""
        return self._shown_of(group)


class ReportView(View):
    """A subject that is shown once, about all groups."""

    def sections(self, report: Any) -> tuple[Section, ...]:
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
        """Returns the source of a group with the numbers of all views; each view sees those of the views before it."""
        with_numbers: Any = source
        for view in self.group:
            if view.key:
                numbers = view.numbers(with_numbers)
                with_numbers = replace(with_numbers, views={**with_numbers.views, view.key: numbers})
        return cast("S", with_numbers)

    def report_numbers(self, source: Any) -> dict[str, object]:
        return {view.key: view.numbers(source) for view in self.report if view.key}

    def opening_sections(self, report: Any) -> list[Section]:
        return sorted(_levelled_sections(self.opening, report), key=lambda section: _DEPTH[section.level])

    def group_sections(self, group: Any) -> list[Section]:
        """Returns the sections of one group, answers before evidence; ids end with that of the group."""
        sections: list[Section] = []
        for view in self.group:
            section = view.section(group)
            if section is not None:
                sections.append(replace(view._levelled(section), id=f"{section.id}-{group.id}"))
        return sorted(sections, key=lambda section: _DEPTH[section.level])

    def closing_sections(self, report: Any) -> list[Section]:
        return _levelled_sections(self.closing, report)

    def missing_of_group(self, group: Any) -> tuple[Missing, ...]:
        return _missing([view for view in self.group if view.has_remedy and view.section(group) is None], group)

    def missing_of_report(self, report: Any) -> tuple[Missing, ...]:
        return _missing([view for view in self.report if view.has_remedy and not view.sections(report)], report)

    def always(self, group_columns: Sequence[str]) -> tuple[NamedTable, ...]:
        """Returns the tables that every report has for programs; `group_columns` precede those of groups."""
        sheets = [(sheet, group_columns) for view in self.group for sheet in view.always()]
        sheets += [(sheet, ()) for view in self.report for sheet in view.always()]
        return tuple(named_table(sheet.name, sheet.title, sheet.columns, columns) for sheet, columns in sheets)

    def schema(self, report_type: type, group_type: type) -> dict[str, Any]:
        """Returns the JSON schema of a report made of these views; each says by the type of `numbers` what it adds."""

        def fields(views: Sequence[View]) -> dict[str, Any]:
            return {view.key: get_type_hints(type(view).numbers)["return"] for view in views if view.key}

        return schema_of(report_type, {group_type: fields(self.group), report_type: fields(self.report)})


def _levelled_sections(views: Sequence[ReportView], report: Any) -> list[Section]:
    return [view._levelled(section) for view in views for section in view.sections(report)]


def _missing(silent: Sequence[View], owner: Any) -> tuple[Missing, ...]:
    missing = (Missing(view=view.id, title=view.title, text=view.remedy(owner)) for view in silent)
    return tuple(entry for entry in missing if entry.text)


def collect(package: ModuleType, *, without: Container[str] = ()) -> Views:
    """Imports the modules of a package, `without` some that hold no view, and returns the views whose class has an
    `after` of its own. `without`: names below the package, e.g. ``storage``.
    """
    group: list[GroupView] = []
    report: list[ReportView] = []
    for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module_info.name.removeprefix(f"{package.__name__}.") in without:
            continue
        for kind in vars(importlib.import_module(module_info.name)).values():
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
    """Returns the views of each start in order; of several that follow one view, those with fewer followers first.
    Raises `ValueError`: two views have one id, or one follows a view that does not exist or that follows it.
    """
    followers: dict[str, list[V]] = {}
    for view in views:
        followers.setdefault(view.after, []).append(view)

    def behind(name: str) -> list[V]:
        chains = [[view, *behind(view.id)] for view in followers.get(name, [])]
        chains.sort(key=lambda chain: (len(chain), chain[0].id))
        return list(itertools.chain.from_iterable(chains))

    if len({view.id for view in views}) < len(views):
        raise ValueError(f"views {', '.join(sorted(view.id for view in views))}: two have one id")
    ordered = tuple(tuple(behind(start)) for start in starts)
    on_page = set(itertools.chain.from_iterable(ordered))
    for view in views:
        if view not in on_page:
            raise ValueError(f"view {view.id}: follows {view.after!r}, which is not on the page")
    return ordered
