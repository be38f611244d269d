"""`dlbench setup`: makes a machine ready."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from dlbench.cli.options import AS_JSON, FILE, value_option
from dlbench.cli.streams import cleaned
from dlbench.errors import ExitCode

_MARKS = {"ok": "ok     ", "absent": "absent ", "problem": "PROBLEM"}


@click.command()
@AS_JSON
def doctor(as_json: bool) -> None:
    """Check what is installed on this machine, what is missing, and how to get it.

    `absent` is fine where the thing is not needed: a login node trains nothing, a laptop has no Slurm.
    Ends with 5 if something is there but broken (PROBLEM).

    \b
    Example:
      dlbench doctor
      dlbench doctor --json | jq '.[] | select(.state != "ok")'
    """
    from dlbench.setup.probes import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        for finding in findings:
            _print(f"{_MARKS[finding.state]} {finding.name}: {finding.detail}")
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
    """Make this machine ready."""


@setup.command()
@click.option("--rebuild", is_flag=True, help="Build even if a wheel for this toolchain is cached.")
@value_option(
    "--source",
    "FILE",
    "Horovod's source archive, for machines without a network (also DLBENCH_HOROVOD_SDIST).",
    type=FILE,
)
def horovod(rebuild: bool, source: Path | None) -> None:
    """Build Horovod from PyPI's source for this Python and torch, and install it.

    Gloo always; MPI where it is found; NCCL where torch is built for CUDA and nvcc is found. The wheel is kept in
    DLBENCH_CACHE (default ~/.cache/dlbench), so the next environment with the same toolchain gets it in seconds. Needs
    g++, make and cmake; no root.

    \b
    Example:
      dlbench setup horovod
    """
    from dlbench.setup.horovod import install

    install(lambda line: click.echo(cleaned(line), err=True), rebuild=rebuild, source=source)


@setup.command()
def images() -> None:
    """Build the decoder of a JPEG's cropped part alone, with the same pixels. Kept in DLBENCH_CACHE.

    Needs a C compiler and libjpeg-turbo's header (Debian: libjpeg-dev), on compute nodes its library.
    """
    from dlbench.datasets.images.jpeg_decode import build_region

    click.echo(build_region())
