"""`dlbench setup` prepares a machine; `doctor` checks it, and `preflight` a system before its first run."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dlbench.cli.options import AS_JSON, FILE, value_option
from dlbench.cli.streams import cleaned
from dlbench.errors import ExitCode, UserError
from dlbench.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlbench.records.preflight import PreflightNode, PreflightReport

_MARK_OF_FINDING = {"ok": "ok     ", "absent": "absent ", "problem": "PROBLEM"}
MAX_NODES_SHOWN = 8  # Rows of the table of nodes; failed nodes come first.
MAX_TEXTS = 4  # Printed problems, and printed doubts; the report file has all.
_MARK_OF_CHECK = {"ok": "ok", "doubt": "DOUBT", "wrong": "WRONG", "unknown": "unknown"}


@click.command()
@AS_JSON
def doctor(as_json: bool) -> None:
    """Check what is installed on this machine, what is missing, and how to install it.

    `absent` is no error if the component is not needed: a login node needs no torch, a laptop needs no Slurm. Exits
    with 5 if a component is installed but does not work (PROBLEM).

    \b
    Example:
      dlbench doctor --json | jq '.[] | select(.state != "ok")'
    """
    from dlbench.setup.probes import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        for finding in findings:
            _print(f"{_MARK_OF_FINDING[finding.state]} {finding.name}: {finding.detail}")
            if finding.state != "ok":
                if finding.needed_for:
                    _print(f"        needed for: {finding.needed_for}")
                if finding.remedy:
                    _print(f"        remedy: {finding.remedy}")
    if any(finding.state == "problem" for finding in findings):
        sys.exit(int(ExitCode.ENVIRONMENT))


def _print(text: str) -> None:
    click.echo(click.wrap_text(text, width=80, subsequent_indent=" " * 10, preserve_paragraphs=True))


@click.group()
def setup() -> None:
    """Prepare this machine: build Horovod, and the image decoder."""


@setup.command(short_help="Build Horovod for this Python and torch, and install it.")
@click.option("--rebuild", is_flag=True, help="Build even if the cache has a wheel for this toolchain.")
@value_option("--source", "FILE", "Horovod's source archive, without network (or: $DLBENCH_HOROVOD_SDIST).", type=FILE)
def horovod(rebuild: bool, source: Path | None) -> None:
    """Build Horovod from its PyPI source for this Python and torch, and install it.

    Gloo is always built in; MPI if it is found; NCCL if torch is built for CUDA and nvcc is found. The wheel is cached
    in DLBENCH_CACHE (default ~/.cache/dlbench). Needs g++, make and cmake, but no root.
    """
    from dlbench.setup.horovod import install

    install(lambda line: click.echo(cleaned(line), err=True), rebuild=rebuild, source=source)


@setup.command(short_help="Build a JPEG decoder that decodes only a cropped part.")
def images() -> None:
    """Build a JPEG decoder that decodes only the cropped part of an image, with the same pixels.

    The library is stored in DLBENCH_CACHE. Building needs a C compiler and the header of libjpeg-turbo (Debian:
    libjpeg-dev); compute nodes need its library.
    """
    from dlbench.datasets.images.jpeg_decode import build_region

    click.echo(build_region())


@click.command()
@click.argument("system", metavar="SYSTEM")
@value_option("--nodes", "N", "Number of nodes of the job.", 2, type=int)
@value_option("--timeout", "SECONDS", "Maximum time to wait for the job, in seconds.", 600.0, type=float)
@click.option("--no-job", is_flag=True, help="Only run sbatch --test-only; submit no job.")
@value_option("--out", "DIR", "Folder for the results; every node must see it.", Path("preflight"), type=FILE)
def preflight(system: str, nodes: int, timeout: float, no_job: bool, out: Path) -> None:
    """Check SYSTEM before its first run: system file, Slurm and every node.

    sbatch --test-only checks the submission options. Then a job of about one minute, started like a run, checks folder,
    Python, versions, cores, GPUs, scratch space and an all-reduce on every node.

    Exits with 5 if the system lacks something, 3 if nodes failed (printed as --exclude), 6 if no job started in time.

    \b
    Example:
      dlbench preflight my-cluster.yaml --nodes 8
    """
    from dlbench.jobs.preflight.check import plan_of
    from dlbench.jobs.preflight.check import preflight as check
    from dlbench.records.folder import prepare_output
    from dlbench.records.preflight import PreflightFolder
    from dlbench.specs.choices import choose_system

    if not 0 < timeout < float("inf"):
        raise UserError(f"--timeout {timeout:g}: must be a number of seconds above 0")
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: must be 1 or more")
    chosen = choose_system(system, {})
    if chosen.scheduler == "none":
        raise UserError(f"system {chosen.name} has no scheduler: `dlbench doctor` checks this machine")
    plan = plan_of(chosen, nodes, machine_cores=len(os.sched_getaffinity(0)), now=datetime.now(UTC))
    folder = PreflightFolder(prepare_output(out) / plan.run_id)
    report = check(plan, folder, timeout, lambda text: click.echo(text, err=True), starts_job=not no_job)
    for line in lines_of(report):
        click.echo(cleaned(line))
    click.echo(f"full report: {folder.report}", err=True)
    sys.exit(report.exit_code)


def lines_of(report: PreflightReport) -> Iterator[str]:
    """Yields a report as lines for a terminal, which may contain control characters."""
    for check in report.job:
        head = f"{check.subject:<20} {_MARK_OF_CHECK[check.state]:<8} "
        text = check.found
        if check.remedy and check.state != "ok":
            text += f" -> {check.remedy}"
        yield from _wrapped(head, text, " " * 22)[:3]
    nodes = sorted(report.nodes, key=lambda node: (not node.problems, not node.doubts))
    if nodes:
        header = ("node", "ranks", "cores", "GPUs", "torch", "local scratch")
        rows = [header, *(_row(node) for node in nodes[:MAX_NODES_SHOWN])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        not_shown = nodes[MAX_NODES_SHOWN:]
        num_failed = sum(bool(node.problems) for node in not_shown)
        if num_failed:
            yield f"and {len(not_shown)} more nodes, {num_failed} of them FAILED"
        elif not_shown:
            yield f"and {len(not_shown)} more nodes"
        for hosts_head, text in [*_by_text(nodes, "problems"), *_by_text(nodes, "doubts")]:
            yield from _wrapped(hosts_head, text)
    if report.exclude:
        yield f"to exclude the failed nodes: --exclude={report.exclude} (slurm.exclude in the system file)"
    yield _verdict(report)


def _by_text(nodes: Sequence[PreflightNode], which: Literal["problems", "doubts"]) -> list[tuple[str, str]]:
    from dlbench.specs.launch import compressed

    hosts: dict[str, list[str]] = {}
    for node in nodes:
        for text in getattr(node, which):
            hosts.setdefault(text, []).append(node.host)
    word = "FAILED" if which == "problems" else "doubt"
    rows = [(f"{compressed(names)}: {word}: ", text) for text, names in hosts.items()]
    if len(rows) > MAX_TEXTS:
        rows[MAX_TEXTS:] = [(f"and {len(rows) - MAX_TEXTS} more of this kind: ", "see the file")]
    return rows


def _wrapped(head: str, text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False) or [head]


def _row(node: PreflightNode) -> tuple[str, ...]:
    if not node.ranks:
        return (node.host, "-", "-", "-", "-", "-")
    first = node.ranks[0]
    gpus, cores = set[str](), set[int]()
    for rank in node.ranks:
        gpus.update(filter(None, (*rank.node_gpus, rank.gpu)))
        cores.update(rank.cores)
    local_folder = next((folder for folder in first.scratch if folder.key == "local"), None)
    scratch = "-"
    if local_folder is not None and local_folder.problem:
        scratch = "NOT usable"
    elif local_folder is not None:
        free = "?" if local_folder.free_bytes is None else format_bytes(local_folder.free_bytes)
        scratch = f"{free} {local_folder.file_system}".strip()
    torch_version = first.versions.get("torch", "none")
    return (node.host, str(len(node.ranks)), str(len(cores)), str(len(gpus) or "none"), torch_version, scratch)


def _verdict(report: PreflightReport) -> str:
    wrong = [check.subject for check in report.job if check.state == "wrong"]
    failed = sum(bool(node.problems) for node in report.nodes)
    if report.exit_code == ExitCode.OK and report.nodes:
        return f"{report.system} is ready for runs: {counted(len(report.nodes), 'node')} passed"
    if report.exit_code == ExitCode.OK:
        return f"{report.system}: no problem found"
    if report.exit_code == ExitCode.INCONCLUSIVE:
        return f"{report.system}: not decided"
    parts = []
    if failed:
        parts.append(f"{failed} of {len(report.nodes)} nodes failed")
    if wrong:
        parts.append(f"wrong: {', '.join(dict.fromkeys(wrong))}")
    return f"{report.system} is not ready for runs: {'; '.join(parts)}"
