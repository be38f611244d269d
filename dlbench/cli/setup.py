"""`dlbench setup` and `doctor`: prepare and check a machine."""

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
