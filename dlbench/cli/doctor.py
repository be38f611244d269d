"""`dlbench doctor`: what is here, what is missing, what to do."""

from __future__ import annotations

import json
import sys

import click

from dlbench.errors import ExitCode

_MARKS = {"ok": "ok     ", "absent": "absent ", "problem": "PROBLEM"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
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
