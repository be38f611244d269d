"""`dlbench ls`: what there is to run, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dlbench.cli.streams import cleaned
from dlbench.errors import DlbenchError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def ls(as_json: bool) -> None:
    """List workloads with their presets, and systems.

    Names come from the folders in DLBENCH_PATH (each may hold workloads/ and systems/), then from dlbench itself.

    \b
    Example:
      DLBENCH_PATH=$HOME/dlbench-site dlbench ls
    """
    content = {"workloads": _workloads(), "systems": _systems()}
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    width = max(len(row["name"]) for rows in content.values() for row in rows)
    for kind, rows in content.items():
        click.echo(kind)
        for row in rows:
            if not _is_example(row):
                _print(row, width)
    examples = [row for row in content["systems"] if _is_example(row)]
    if examples:
        click.echo("examples of systems, to copy and edit")
        for row in examples:
            click.echo(cleaned(f"  {row['name']:<{width}} {row['title'].removeprefix('Example: ')}"))
        click.echo(cleaned(f"    {Path(examples[0]['file']).parent}"))


def _is_example(row: dict[str, Any]) -> bool:
    return row["name"].startswith("example-") and "title" in row


def _print(row: dict[str, Any], width: int) -> None:
    click.echo(f"  {row['name']:<{width}} {cleaned(row.get('title') or row['problem'])}")
    for preset, about in row.get("presets", {}).items():
        # Without words there would be no line to indent.
        head = f"    {preset:<10} "
        click.echo(click.wrap_text(about, width=78, initial_indent=head, subsequent_indent=" " * 15) or head)
    click.echo(cleaned(f"    {row['file']}"))


def _workloads() -> list[dict[str, Any]]:
    from dlbench.specs.choices import WorkloadFile
    from dlbench.specs.files import available

    rows: list[dict[str, Any]] = []
    for name, path in available("workloads").items():
        row: dict[str, Any] = {"name": name, "file": str(path)}
        try:
            file = WorkloadFile(path)
            row["title"] = str(file.base.get("title", file.base.get("name", path.stem)))
            row["presets"] = {
                key: " ".join(str(preset.get("about", "")).split()) for key, preset in file.presets.items()
            }
        except DlbenchError as error:
            row["problem"] = f"unusable: {error}"
        rows.append(row)
    return rows


def _systems() -> list[dict[str, Any]]:
    from dlbench.specs.choices import choose_system
    from dlbench.specs.files import available

    rows: list[dict[str, Any]] = []
    for name, path in available("systems").items():
        row: dict[str, Any] = {"name": name, "file": str(path)}
        try:
            row["title"] = choose_system(str(path), {}).title
        except DlbenchError as error:
            row["problem"] = f"unusable: {error}"
        rows.append(row)
    return rows
