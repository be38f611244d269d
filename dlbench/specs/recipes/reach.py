"""Whether a recipe can reach its target, as far as published results say; asked before anything runs."""

from __future__ import annotations

from dlbench.specs.training import QualitySpec, TrainSpec

TABLE = "train.optimizer.learning_rate_table"


def goal_problem(train: TrainSpec, quality: QualitySpec, *, global_batch: int, starts_from: str | None) -> str | None:
    """Why training to the target is not offered, and what to do, in one sentence; None if it is.

    Args:
        train: the recipe.
        quality: the target.
        global_batch: samples of one step over all ranks.
        starts_from: the checkpoint that training begins with; None for random weights.
    """
    if quality.starts_from == "checkpoint" and starts_from is None:
        return (
            f"this recipe reaches {quality.target:g} from trained weights only: give checkpoint.initialize_from a "
            "checkpoint of the phase before (a published one as safetensors, or dlbench's own)"
        )
    place = train.optimizer.place(global_batch)
    if place is not None and place.where == "beyond":
        return (
            f"a global batch of {global_batch:,} is beyond the last row of {TABLE} ({place.row.batch:,}): no rate is "
            "published that reaches the target there; use fewer ranks or a smaller train.batch_per_rank"
        )
    return None


def recipe_note(train: TrainSpec, *, global_batch: int, to_quality: bool) -> str | None:
    """What a person should know of a global batch that no row of the table has, in one sentence; None if nothing.

    Args:
        train: the recipe.
        global_batch: samples of one step over all ranks.
        to_quality: whether training is to reach a target; else only a batch beyond the table is told of.
    """
    place = train.optimizer.place(global_batch)
    if place is None or place.where == "row" or not (to_quality or place.where == "beyond"):
        return None
    batch, row = f"a global batch of {global_batch:,}", f"{place.row.batch:,}"
    if place.where == "beyond":
        return (
            f"{batch} is beyond the last row of {TABLE} ({row}), whose rate it keeps: speed is measured, but its "
            "losses show no recipe that converges"
        )
    if place.where == "below":
        return f"{batch} is below the first row of {TABLE} ({row}): its rate is scaled down from there, not published"
    assert place.above is not None
    return (
        f"{batch} lies between the rows {row} and {place.above.batch:,} of {TABLE}: its rate is interpolated, not "
        "published"
    )
