"""`dlbench estimate`: how long a training takes at a throughput, and whether a stated time can be true."""

from __future__ import annotations

import sys

import click

from dlbench.costs.training_time import (
    PUBLISHED_TRAINING_SAMPLES,
    Verdict,
    consistency,
    time_to_train,
    total_throughput,
    training_samples,
)
from dlbench.errors import ExitCode, UserError
from dlbench.units import format_number, format_seconds, parse_seconds


def _positive(_ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """A number above zero."""
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e15:  # not-a-number is neither
        raise UserError(f"{param.opts[0]} {text[:80]!r}: must be a number above zero, at most 1e15")
    return number


def _share(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """An efficiency; somewhat above 1 where caches help, never a percentage."""
    share = _positive(ctx, param, text)
    if share is not None and share > 2:
        raise UserError(f"{param.opts[0]} {text!r}: must be a share, e.g. 0.992 for 99.2 %")
    return share


def _duration(_ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Text such as 6.6min, 90s or 2h as seconds, above zero."""
    if text is None:
        return None
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UserError(f"{param.opts[0]}: {error}") from None


_COUNT = click.IntRange(min=1, max=10**15)


@click.command()
@click.argument("workload")
@click.option(
    "--throughput", metavar="NUMBER", callback=_positive, required=True, help="Samples a second, all ranks together."
)
@click.option("--per-rank", is_flag=True, help="The throughput is that of one rank; needs --ranks.")
@click.option("--ranks", type=_COUNT, metavar="N", help="Ranks, for --per-rank.")
@click.option(
    "--efficiency", metavar="SHARE", callback=_share, help="Weak-scaling efficiency, for --per-rank (default: 1)."
)
@click.option("--epochs", metavar="NUMBER", callback=_positive, help="Epochs trained.")
@click.option("--epoch-samples", type=_COUNT, metavar="N", help="Samples of an epoch (default: what WORKLOAD says).")
@click.option("--samples", type=_COUNT, metavar="N", help="Samples trained, instead of epochs.")
@click.option(
    "--time",
    "stated",
    metavar="DURATION",
    callback=_duration,
    help="A stated time to train, e.g. 6.6min: can it be true?",
)
def estimate(
    workload: str,
    throughput: float,
    per_rank: bool,
    ranks: int | None,
    efficiency: float | None,
    epochs: float | None,
    epoch_samples: int | None,
    samples: int | None,
    stated: float | None,
) -> None:
    """Estimate the time to train WORKLOAD at a throughput; with --time, check whether all numbers can be true.

    Time in training steps only: start, staging and evaluation come on top. Ends with 1 if the stated time is too
    short for the throughput.

    \b
    Examples:
      dlbench estimate resnet50 --throughput 218 --per-rank --ranks 1024 --epochs 90
      dlbench estimate resnet50 --throughput 27500 --epochs 90 --time 7.8min
      dlbench estimate bert --throughput 3000 --samples 2500000
    """
    _refuse_inert(per_rank, ranks, efficiency)
    unit, own_samples, data_set = _workload(workload)
    per_epoch, passes, amount = _amount(workload, own_samples, unit, epochs, epoch_samples, samples)
    total = total_throughput(throughput, ranks, efficiency or 1.0) if per_rank and ranks else throughput
    count = training_samples(per_epoch, passes)
    _row("training", amount)
    if samples is None:
        _row("data set", "--epoch-samples" if epoch_samples else data_set)
    parts = f" ({format_number(throughput)} x {ranks} ranks x {efficiency or 1.0:g})" if per_rank else ""
    _row("throughput", f"{_count(total)} {unit}/s{parts}")
    _row("time to train", _time(time_to_train(count, total)))
    if stated is None:
        return
    verdict = consistency(total, per_epoch, passes, stated)
    _row("stated time", f"{_time(stated)}: needs {_count(verdict.needed_throughput)} {unit}/s")
    _row("verdict", _words(verdict))
    if verdict.group is not None and verdict.group_s is not None:
        whose = "--ranks counts nodes" if per_rank else "the throughput is that of a node"
        _row("perhaps", f"{whose} of {verdict.group}: then it takes")
        _row("", f"{_time(verdict.group_s)}, {verdict.group_s / stated - 1:+.0%} against the stated time")
    if verdict.status == "impossible":
        sys.exit(int(ExitCode.REGRESSION))


def _refuse_inert(per_rank: bool, ranks: int | None, efficiency: float | None) -> None:
    """An option that would act on nothing is a misunderstanding."""
    if per_rank and ranks is None:
        raise UserError("--per-rank: needs the number of ranks: give --ranks")
    for name, value in (("--ranks", ranks), ("--efficiency", efficiency)):
        if value is not None and not per_rank:
            raise UserError(f"{name} {value:g}: has no effect on the throughput of all ranks; add --per-rank")


def _workload(name: str) -> tuple[str, int | None, str]:
    """Unit of a sample, samples of an epoch if they are known, and which data set has them.

    A published set is that of a bundled workload alone: a file of one's own trains on data of one's own.
    """
    from dlbench import bundled
    from dlbench.specs.choices import WorkloadFile, choose
    from dlbench.specs.resolve import find

    path = find("workloads", name)
    chosen = choose(WorkloadFile(path), None, {})
    if path.parent == bundled.folder("workloads"):
        return chosen.sample_unit, *PUBLISHED_TRAINING_SAMPLES.get(chosen.model.family, (None, ""))
    return chosen.sample_unit, chosen.train.schedule.epoch_samples, f"train.schedule.epoch_samples of {name}"


def _amount(
    name: str, own_samples: int | None, unit: str, epochs: float | None, epoch_samples: int | None, samples: int | None
) -> tuple[int, float, str]:
    """Samples of an epoch, epochs, and both in words. Samples alone are one epoch of as many."""
    if samples is not None:
        for option, value in (("--epochs", epochs), ("--epoch-samples", epoch_samples)):
            if value is not None:
                raise UserError(f"{option} {value:g}: --samples {samples} says already how much is trained; drop one")
        return samples, 1.0, f"{samples:,} {unit}"
    per_epoch = epoch_samples or own_samples
    if per_epoch is None:
        raise UserError(
            f"--epoch-samples: missing; {name} does not say how many {unit} an epoch has "
            "(train.schedule.epoch_samples): give that N with --epochs, or --samples 2500000 alone"
        )
    if epochs is None:
        raise UserError("--epochs: missing; say how much is trained, e.g. --epochs 90, or --samples 2500000")
    total = round(training_samples(per_epoch, epochs))
    return per_epoch, epochs, f"{epochs:g} epochs x {per_epoch:,} = {total:,} {unit}"


def _words(verdict: Verdict) -> str:
    if verdict.status == "impossible":
        return f"impossible: {verdict.speed_factor:.3g} times faster than the throughput allows"
    if verdict.status == "unexplained":
        rest = format_seconds(verdict.stated_s - verdict.expected_s)
        return f"possible, but {rest} are not explained by the throughput"
    return "fits"


def _count(value: float) -> str:
    """Whole samples a second where there are many, four digits where there are few."""
    return f"{value:,.0f}" if value >= 1000 else format_number(value)


def _time(seconds: float) -> str:
    """In words, and from a minute on as publications print it."""
    return format_seconds(seconds) + (f" ({format_number(seconds / 60, 3)} min)" if seconds >= 60 else "")


def _row(title: str, text: str) -> None:
    click.echo(f"{title:<14} {text}")
