"""`*.network.json`: the fitted costs of one system and carrier, chosen from all fits."""

from __future__ import annotations

from dlbench.collectives.results.fit import Fit, Scope, collectives, fit_all
from dlbench.collectives.results.tables import CommTable
from dlbench.errors import IncompleteDataError, UserError, nearest
from dlbench.specs.collectives.network import NetworkModel


def fit_one(
    table: CommTable, *, system: str | None, transport: str | None, dtype: str | None, fitted: str, where: str
) -> Fit:
    """The fit that a file holds: of one system, one carrier, one type of element.

    Where only libraries were measured the model has no levels, and holds their lines alone.

    Args:
        table: measurements.
        system: which system; None: the only one.
        transport: which carrier; None: the only one.
        dtype: which type; None: fp32 if it was measured, else the only one.
        fitted: the time to write into the model, UTC, ISO 8601.
        where: what errors call the runs.

    Raises:
        UserError: several systems, carriers or types, and none chosen; or one that was not measured.
        IncompleteDataError: no run has figures, or too few of them for a fit.
    """
    if not table.groups:
        reasons = [f"{one.run.plan.run_id}: {one.state}: {one.why}" for one in table.without] or list(table.damaged)
        raise IncompleteDataError(
            f"{where}: no run of the collective benchmark has figures; "
            + (f"{reasons[0]}" + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "") if reasons else "none")
        )
    chosen = _chosen("--system", system, [group.sample.plan.system.name for group in table.groups], where)
    groups = [group for group in table.groups if group.sample.plan.system.name == chosen]
    known = [group.dtype for group in groups]
    precision = _chosen("--dtype", dtype or ("fp32" if "fp32" in known else None), list(known), where)
    groups = [group for group in groups if group.dtype == precision]
    own = [one.name.carrier for group in groups for one in group.series if not one.name.is_library]
    carriers = own or [one.name.carrier for group in groups for one in group.series]
    carrier = _chosen("--transport", transport, carriers, where)
    table = CommTable(groups=tuple(groups), without=(), damaged=())
    scope = Scope(system=chosen, carrier=carrier, dtype=groups[0].dtype)
    fits = fit_all(table, fitted=fitted, only=scope)
    if fits.fits:
        return fits.fits[0]
    if own:
        raise IncompleteDataError(f"{where}: {fits.unfitted[0]}")
    lines = collectives(table, fits.lines, scope)
    if not lines:
        raise IncompleteDataError(f"{where}: {scope.title}: one size only; a line needs two or more (--sizes)")
    runs = tuple(dict.fromkeys(run.plan.run_id for group in groups for run in group.runs))
    network = NetworkModel(system=chosen, transport=carrier, collectives=lines, sources=runs, fitted=fitted)
    ranks = tuple(sorted({line.ranks for line in lines}))
    return Fit(scope=scope, network=network, ranks=ranks, held_out_by="", predicted={}, errors=())


def _chosen(option: str, asked: str | None, found: list[str], where: str) -> str:
    known = list(dict.fromkeys(found))
    if asked is not None:
        if asked not in known:
            raise UserError(f"{option} {asked}: not among the runs in {where}: {nearest(asked, known)}")
        return asked
    if len(known) > 1:
        raise UserError(
            f"{where}: one file holds one of {', '.join(known)}; choose by {option}, e.g. {option} {known[0]}"
        )
    return known[0]
