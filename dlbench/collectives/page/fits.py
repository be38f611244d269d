"""Fits of the collective benchmark as the report shows them."""

from __future__ import annotations

from collections.abc import Iterator

from dlbench.collectives.page import model
from dlbench.collectives.results.fit import Fit, Fits, model_crossovers
from dlbench.collectives.results.tables import CommGroup
from dlbench.report.wording import clean
from dlbench.specs.collectives.network import Level, LevelName


def fit_table(fit: Fit) -> model.FitTable:
    """A fit with its errors and lines."""
    network = fit.network
    pieces = [*_pieces("inside", network.inside), *_pieces("across", network.across)]
    return model.FitTable(
        label=clean(f"Fitted costs of {fit.scope.title}"),
        system=clean(fit.scope.system),
        carrier=clean(fit.scope.carrier),
        dtype=fit.scope.dtype,
        pieces=tuple(pieces),
        gamma_s_per_byte=network.gamma_s_per_byte,
        shared_link=network.shared_link,
        shared_memory=network.shared_memory,
        num_points=network.num_points,
        ranks=fit.ranks,
        held_out_by=fit.held_out_by,
        errors=tuple(
            model.ErrorRow(scope=clean(one.scope), num_points=one.num_points, median=one.median, worst=one.worst)
            for one in fit.errors
        ),
        lines=tuple(
            model.LineRow(name=clean(one.name), ranks=one.ranks, startup_s=one.startup_s, per_byte_s=one.per_byte_s)
            for one in network.collectives
        ),
    )


def model_crossover_rows(group: CommGroup, fits: Fits) -> Iterator[model.CrossoverRow]:
    """Where the models of a group's carriers expect the lead to change."""
    for carrier in dict.fromkeys(series.name.carrier for series in group.series if not series.name.is_library):
        fit = fits.of(group, carrier)
        for one in () if fit is None else model_crossovers(group, fit):
            yield model.CrossoverRow(
                source="model",
                before=clean(one.before.title),
                after=clean(one.after.title),
                num_bytes=one.num_bytes,
                low=None,
                high=None,
                is_clear=None,
            )


def _pieces(name: LevelName, level: Level | None) -> Iterator[model.PieceRow]:
    for piece in () if level is None else level.pieces:
        alpha, beta = piece.alpha_interval_s, piece.beta_interval_s_per_byte
        yield model.PieceRow(
            level=name,
            up_to_bytes=piece.up_to_bytes,
            alpha_s=piece.alpha_s,
            alpha_low_s=alpha[0] if alpha else None,
            alpha_high_s=alpha[1] if alpha else None,
            beta_s_per_byte=piece.beta_s_per_byte,
            beta_low_s_per_byte=beta[0] if beta else None,
            beta_high_s_per_byte=beta[1] if beta else None,
        )
