"""The view of the lost percent by cause."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.views.causes.charts import cause_charts
from dlbench.views.causes.tables import account_of, cause_sheets
from dlbench.views.causes.words import cause_words


def why_no_causes(group: Group) -> str:
    """Runs with something taken away on purpose have no account of causes."""
    return (
        "not told: in these runs something was taken away on purpose; the plain runs beside them have this view, and "
        "dlbench diagnose tells the difference."
    )


VIEW = View(
    id="causes",
    title="The lost percent, by cause",
    place="group",
    is_for=lambda group: group.causes is not None,
    remedy=why_no_causes,
    words=lambda group: cause_words(account_of(group).diagnosed),
    charts=cause_charts,
    sheets=cause_sheets,
    template="sheets.html.j2",
)
