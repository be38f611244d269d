"""`dlbench estimate` and `cost`: training time and price from runs or a throughput, and the cost of Slurm jobs."""

from __future__ import annotations

import glob
import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from dlbench.cli.options import AS_JSON, FILE, duration, given_options, value_option
from dlbench.cli.report import emit, finish, named, prepared, read_runs, require_modules, runs_argument, where_option
from dlbench.errors import ExitCode, UserError
from dlbench.perfmodels.data_sheets import TERA
from dlbench.perfmodels.training_time import HOUR_S, TimeVerdict, consistency
from dlbench.units import first_of, format_number, format_seconds, plural

_CURRENCY = r"(?!GPU|node|core|rank|per\b|h(?:rs?|ours?)?\b)[A-Z]{2,6}(?![A-Z_-])|[€$£¥]"
_AMOUNT = re.compile(
    rf"(?P<before>{_CURRENCY})? ?(?P<number>[0-9]{{1,12}}(?:\.[0-9]{{1,6}})?) ?(?(before)|(?P<behind>{_CURRENCY})?)"
    r" ?(?P<hours>(?P<per>/ ?|per )?(?:(?P<held>GPU|node|core|rank)[ -]?)?h(?:rs?|ours?)?)?",
    re.IGNORECASE,
)
_FORMS = {
    "--price": ("the price of an hour", "'2.50 EUR' or '9 EUR/node-hour'"),
    "--price-per-node-hour": ("the price of a node-hour", "'9 EUR'"),
    "--budget": ("hours or money", "'500 GPU-hours' or, with --price in EUR, '900 EUR'"),
}

_PUBLISHED_MFU = ((0.2634, "lowest of language models on H100"), (0.4644, "highest of language models on H100"))
"""MFU of MPT with 0.76 to 70 billion parameters in bf16 on 8 to 64 H100: github.com/mosaicml/llm-foundry,
scripts/train/benchmarking/README.md (commit 061f2c7), table "H100 80GB BF16"."""

_NOT_BY_PEAK = ("where", "deadline", "budget", "as_json", "throughput", "per_rank", "efficiency", "stated")


def _positive(_ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
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
    """Parses an efficiency as a share, not as a percentage; it may be above 1, because caches can help."""
    share = _positive(ctx, param, text)
    if share is not None and share > 2:
        raise UserError(f"{param.opts[0]} {text!r}: must be a share, e.g. 0.992 for 99.2 %")
    return share


def whole(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Parses a whole number above zero, e.g. 2500000 or 2.5e6."""
    number = _positive(ctx, param, text)
    if number is not None and not number.is_integer():
        raise UserError(f"{param.opts[0]} {text!r}: must be a whole number, e.g. 2500000 or 2.5e6")
    return None if number is None else int(number)


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="RUNS...|WORKLOAD")
@where_option("--where", "runs")
@value_option("--epochs", "NUMBER", "Number of epochs (default with RUNS: that of their recipe).", callback=_positive)
@value_option("--epoch-samples", "N", "Samples per epoch (default: that of RUNS or WORKLOAD).", callback=whole)
@value_option("--samples", "N", "Number of samples to train, instead of epochs.", callback=whole)
@value_option(
    "--price",
    "PRICE",
    "Price of a GPU-hour, e.g. '2.50 EUR'. Without GPUs it is the price of a rank-hour, or of a node-hour if jobs "
    "allocate whole nodes. The unit can be given (GPU, node, core, rank): '0.02 EUR/core-hour'.",
)
@value_option("--deadline", "DURATION", "Find the cheapest rank count within this time, e.g. 3d.", callback=duration)
@value_option("--budget", "AMOUNT", "Find the fastest rank count within e.g. '500 GPU-hours' or '900 EUR'.")
@AS_JSON
@value_option("--throughput", "NUMBER", "Throughput of WORKLOAD on all ranks, in samples/s.", callback=_positive)
@click.option("--per-rank", is_flag=True, help="--throughput is that of one rank; needs --ranks.")
@value_option("--ranks", "N", "Rank count, for --per-rank, or of --system (default: one node).", callback=whole)
@value_option("--efficiency", "SHARE", "Weak-scaling efficiency, for --per-rank (default: 1).", callback=_share)
@value_option("--system", "NAME|FILE", "Estimate WORKLOAD from its FLOPs and the peak of a system, by data sheet.")
@value_option(
    "--mfu",
    "SHARE",
    "Assumed model FLOPs utilisation of --system (default: lowest and highest published, of language models on H100).",
    callback=_share,
)
@value_option("--time stated", "DURATION", "With --throughput: training time to check, e.g. 6.6min.", callback=duration)
def estimate(
    what: tuple[str, ...],
    where: tuple[str, ...],
    price: str | None,
    deadline: float | None,
    budget: str | None,
    as_json: bool,
    throughput: float | None,
    per_rank: bool,
    ranks: int | None,
    efficiency: float | None,
    system: str | None,
    mfu: float | None,
    stated: float | None,
    **length: Any,
) -> None:
    """Estimate training time, GPU-hours and price, from RUNS, from a throughput, or from the peak of a system.

    From RUNS (run folders, folders of runs, histories), every measured rank count is estimated; from --throughput or
    --system, the time to train WORKLOAD. The amount of training is that of the runs' recipe, of --epochs or --samples.

    Exits with 1 if in a group of runs no rank count meets --deadline and --budget (--where selects runs), or if --time
    is too short for the throughput; with 4 if a file is damaged or no run has figures.

    \b
    Examples:
      dlbench estimate runs --epochs 90 --deadline 3d --price "2.50 EUR"
      dlbench estimate resnet50 --throughput 27500 --epochs 90 --time 7.8min
      dlbench estimate resnet50 --system abci --ranks 64 --mfu 0.3 --epochs 90 --price "2.50 EUR"
    """
    epochs, epoch_samples, samples = length["epochs"], length["epoch_samples"], length["samples"]
    for option, value in (("--epochs", epochs), ("--epoch-samples", epoch_samples)):
        if samples is not None and value is not None:
            raise UserError(f"{option} {value:g}: --samples {samples} sets the amount already; leave one out")
    if system is not None:
        _by_peak(what, system, mfu, ranks, price, length)
        return
    if throughput is None:
        for option in given_options("mfu", "per_rank", "ranks", "efficiency", "stated"):
            raise UserError(f"{option}: only for WORKLOAD --throughput or --system; runs have a measured speed")
        if epoch_samples is not None and epochs is None:
            raise UserError(f"--epoch-samples {epoch_samples}: has no effect without --epochs")
        question = {**length, "deadline_s": deadline, **_costs(price, budget)}
        _estimate_runs(tuple(map(Path, what)), where, question, as_json)
        return
    if len(what) > 1 or Path(what[0]).is_dir():
        raise UserError(f"--throughput {throughput:g}: needs one WORKLOAD; leave it out for runs ({what[-1]})")
    for option in given_options("where", "price", "deadline", "budget", "as_json", "mfu"):
        raise UserError(f"{option}: only for RUNS or --system, not for WORKLOAD --throughput")
    if per_rank and ranks is None:
        raise UserError("--per-rank: needs the number of ranks: give --ranks")
    for option, value in (("--ranks", ranks), ("--efficiency", efficiency)):
        if value is not None and not per_rank:
            raise UserError(f"{option} {value:g}: has no effect on the throughput of all ranks; add --per-rank")
    _time_to_train(what[0], length, throughput, ranks if per_rank else None, efficiency, stated)


def _by_peak(
    what: tuple[str, ...],
    system_name: str,
    mfu: float | None,
    ranks: int | None,
    price_text: str | None,
    length: dict[str, Any],
) -> None:
    """Prints time, GPU-hours and price of a training by its FLOPs and shares of the peak; `length`: see `_amount`."""
    if len(what) > 1:
        raise UserError(f"--system {system_name}: needs one WORKLOAD, not {len(what)}")
    for option in given_options(*_NOT_BY_PEAK):
        raise UserError(f"{option}: has no effect on WORKLOAD --system")
    from dlbench.projection.ideal import workload_for
    from dlbench.projection.spec_machine import device_peak
    from dlbench.specs.choices import choose_system_with_origins

    system = choose_system_with_origins(system_name, {})[0]
    if not system.node.gpus:
        raise UserError(f"--system {system_name}: has no GPUs (node.gpus), to whose peak the utilisation refers")
    workload, count = workload_for(what[0], None, [system]), ranks or system.node.default_ranks
    precision, nodes = workload.train.precision, -(-count // system.node.default_ranks)
    flops_per_s = device_peak(system, precision)
    price, currency, held = amount_of("--price", price_text)
    num_held = {"": count, "GPU": count, "node": nodes}.get(held)
    if num_held is None:
        raise UserError(f"--price {price_text}: with --system, must be of a GPU-hour or a node-hour")
    unit, own_samples, _ = _workload(what[0])
    samples, epochs, amount = _amount(what[0], own_samples, unit, **length)
    flops = samples * epochs * workload.model.training_flops(workload.data)
    _row("training", amount)
    _row("FLOPs", f"{flops:.4g}, of the model alone; {workload.preset} preset, {precision}")
    _row(
        "peak",
        f"{count} x {flops_per_s / TERA:g} TFLOP/s by data sheet, {nodes} {plural('node', nodes)} of {system.name}",
    )
    for share, source in _PUBLISHED_MFU if mfu is None else ((mfu, "as assumed"),):
        seconds = flops / (count * flops_per_s * share)
        cost = f"{_time(seconds)}, {_count(count * seconds / HOUR_S)} GPU-hours"
        if price is not None:
            cost += f", price {_count(num_held * seconds / HOUR_S * price)} {currency}".rstrip()
        _row(f"MFU {share:.2%}", f"{source}: {cost}")


def _time_to_train(
    workload: str,
    length: dict[str, Any],
    throughput: float,
    ranks: int | None,
    efficiency: float | None,
    stated: float | None,
) -> None:
    """Prints the time to train a workload; `ranks`: None if the throughput is that of all ranks."""
    unit, own_samples, data_set = _workload(workload)
    per_epoch, passes, amount = _amount(workload, own_samples, unit, **length)
    _row("training", amount)
    if length["samples"] is None:
        _row("data set", "--epoch-samples" if length["epoch_samples"] else data_set)
    total, factors = throughput, ""
    if ranks:
        total *= ranks * (efficiency or 1.0)
        factors = f" ({format_number(throughput)} x {ranks} ranks x {efficiency or 1.0:g})"
    _row("throughput", f"{_count(total)} {unit}/s{factors}")
    _row("time to train", _time(per_epoch * passes / total))
    if stated is None:
        return
    verdict = consistency(total, per_epoch, passes, stated)
    _row("stated time", f"{_time(stated)}: needs {_count(verdict.needed_throughput)} {unit}/s")
    _row("verdict", _words(verdict))
    if verdict.group_size is not None and verdict.group_s is not None:
        assumption = "--ranks counts nodes" if ranks else "the throughput is that of a node"
        _row("perhaps", f"{assumption} of {verdict.group_size}: then it takes")
        _row("", f"{_time(verdict.group_s)}, {verdict.group_s / stated - 1:+.0%} against the stated time")
    if verdict.status == "impossible":
        sys.exit(int(ExitCode.REGRESSION))


def amount_of(option: str, text: str | None) -> tuple[float | None, str, str]:
    """Returns number, currency and the resource whose hours are counted; the latter two may be empty."""
    if text is None:
        return None, "", ""
    match, (description, form) = _AMOUNT.fullmatch(" ".join(text.split())), _FORMS[option]
    if match is None or not float(match["number"]):
        raise UserError(f"{option} {text[:80]!r}: must be an amount above zero, e.g. {form}")
    currency, resource = (match["before"] or match["behind"] or "").upper(), (match["held"] or "").lower()
    if match["hours"] and not resource:
        raise UserError(f"{option} {text[:80]!r}: the resource of the hours is missing, e.g. {form}")
    # A price is per hour of a resource; a budget is either hours of a resource or money.
    if option.startswith("--price"):
        is_wrong = bool(resource and not match["per"])
    else:
        is_wrong = bool(match["per"]) or bool(resource) == bool(currency)
    if is_wrong:
        raise UserError(f"{option} {text[:80]!r}: must be {description}, e.g. {form}")
    return float(match["number"]), currency, resource.replace("gpu", "GPU")


def _costs(price: str | None, budget: str | None) -> dict[str, Any]:
    cost, currency, cost_of = amount_of("--price", price)
    limit, money, limit_of = amount_of("--budget", budget)
    if budget and not limit_of and money != currency:
        problem = f"--price is in {currency}" if currency else f"needs --price in {money}"
        raise UserError(f"--budget {budget}: {problem}; an amount of hours is e.g. '500 GPU-hours'")
    if cost_of and limit_of and cost_of != limit_of:
        raise UserError(f"--budget {budget}: is in {limit_of}-hours, but --price is per {cost_of}-hour; use one unit")
    resource = cost_of or limit_of or None
    return {"price": cost, "currency": currency, "held": resource, "budget": limit, "is_money": bool(money)}


def _estimate_runs(runs: tuple[Path, ...], where: tuple[str, ...], question: dict[str, Any], as_json: bool) -> None:
    if not any(path.is_dir() or glob.has_magic(str(path)) for path in runs):
        raise UserError(f"{runs[0]}: is not a folder of runs; for a workload, --throughput NUMBER is missing")
    require_modules("estimate", "numpy")
    from dlbench.views.command_reports import estimate as estimate_of
    from dlbench.views.time_to_train import TimeToTrain, TrainingQuestion

    report, document = estimate_of(read_runs(runs, where), TrainingQuestion(**question))
    emit(document, "json" if as_json else "text", None, full=True)
    times = [time_to_train for group in report.groups if (time_to_train := group.of(TimeToTrain))]
    problem = f"{named(runs)}: no run has figures of speed; `dlbench report` says why"
    finish(report.damaged, problem, unless=times)
    if not all(answer.is_met for time_to_train in times for answer in time_to_train.answers):
        sys.exit(int(ExitCode.REGRESSION))


def _workload(name: str) -> tuple[str, int | None, str]:
    """Returns sample unit, samples per epoch if known, and their source; only bundled workloads have published data."""
    from dlbench import bundled
    from dlbench.specs.choices import WorkloadFile, choose
    from dlbench.specs.files import find

    path = find("workloads", name)
    chosen = choose(WorkloadFile(path), None, {})
    if path.parent == bundled.folder("workloads"):
        return chosen.sample_unit, *(chosen.model.epoch_samples or (None, ""))
    return chosen.sample_unit, chosen.train.schedule.epoch_samples, f"train.schedule.epoch_samples of {name}"


def _amount(
    name: str, own_samples: int | None, unit: str, epochs: float | None, epoch_samples: int | None, samples: int | None
) -> tuple[int, float, str]:
    """Returns samples per epoch, number of epochs, and both as text; --samples alone counts as one epoch."""
    if samples is not None:
        return samples, 1.0, f"{samples:,} {unit}"
    per_epoch = epoch_samples or own_samples
    if per_epoch is None:
        raise UserError(
            f"--epoch-samples: missing; {name} does not say how many {unit} an epoch has "
            "(train.schedule.epoch_samples): give that N with --epochs, or --samples 2500000 alone"
        )
    if epochs is None:
        raise UserError("--epochs: missing; set the amount of training, e.g. --epochs 90, or --samples 2500000")
    total = round(per_epoch * epochs)
    return per_epoch, epochs, f"{epochs:g} {plural('epoch', epochs)} x {per_epoch:,} = {total:,} {unit}"


def _words(verdict: TimeVerdict) -> str:
    if verdict.status == "impossible":
        return f"impossible: {verdict.speed_factor:.3g} times faster than the throughput allows"
    if verdict.status == "unexplained":
        unexplained = format_seconds(verdict.stated_s - verdict.expected_s)
        return f"possible, but {unexplained} are not explained by the throughput"
    return "fits"


def _count(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return format_number(value)


def _time(seconds: float) -> str:
    """Formats a duration; from one minute on also in minutes, as publications do."""
    if seconds < 60:
        return format_seconds(seconds)
    return f"{format_seconds(seconds)} ({format_number(seconds / 60, 3)} min)"


def _row(title: str, text: str) -> None:
    click.echo(f"{title:<14} {text}")


@click.command()
@runs_argument(default="runs")
@where_option("--where", "runs")
@value_option("-o --output", None, "File to write: .html, .md, .json, .csv or .txt (default: stdout).", type=FILE)
@click.option("--full", is_flag=True, help="Print one line per run.")
@AS_JSON
def cost(runs: tuple[Path, ...], where: tuple[str, ...], output: Path | None, full: bool, as_json: bool) -> None:
    """Report what the Slurm jobs of RUNS (default: runs) cost, by point and by result.

    Prints the node-hours requested, allocated and wasted, queue wait, memory and energy. Slurm's answer is stored with
    each run (accounting.json), because Slurm deletes it after some time. Without accounting, squeue knows the times of
    a job for some minutes. Times from the runs' records are printed next to Slurm's.

    Exits with 6 if Slurm has no data, with 4 if a run is damaged.

    \b
    Example:
      dlbench cost runs --where series=nightly -o cost.html
    """
    from dlbench.jobs.slurm.accounting import with_accounting
    from dlbench.report.wording import clean
    from dlbench.views.campaign_cost import campaign_cost, cost_document, recorded_parts, recorded_text

    chosen = prepared("cost", output, "json" if as_json else None, needs=())
    scanned = read_runs(runs, where)
    runs_with_cost, why_not = with_accounting(scanned.runs)
    total_cost = campaign_cost(runs_with_cost)
    for reason in dict.fromkeys(why_not.values()):
        names = [clean(name) for name, text in why_not.items() if text == reason]
        click.echo(f"dlbench: no cost of {first_of(names, 1)}: {clean(reason)}", err=True)
    for problem in scanned.problems:
        click.echo(f"dlbench: damaged: {problem}", err=True)
    if total_cost is not None:
        emit(cost_document(total_cost), chosen, output, "cost-points", full=full)
    elif as_json:
        click.echo(json.dumps(None))
    elif recorded := recorded_parts(runs_with_cost):
        click.echo(f"Cost by Slurm: not measured. {recorded_text(recorded)}")
    if scanned.problems:
        sys.exit(int(ExitCode.INCOMPLETE))
    if total_cost is None:
        if not why_not:
            click.echo(f"dlbench: {named(runs)}: none of these runs was submitted to Slurm", err=True)
        sys.exit(int(ExitCode.INCONCLUSIVE))
