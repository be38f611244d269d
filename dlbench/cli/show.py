"""`dlbench show`: one workload or system, every key decided."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from dlbench.errors import UserError, nearest


@click.command()
@click.argument("name")
@click.option("--preset", metavar="NAME", help="Preset of a workload.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key first.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of YAML.")
def show(name: str, preset: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the workload or system NAME as a run would see it, defaults included.

    The keys printed are the ones that --set and --sweep of `dlbench run` take; for a system, with system. before them.

    \b
    Example:
      dlbench show resnet50 --preset ci --set train.batch_per_rank=16
    """
    from dlbench.specs.choices import WorkloadFile, choose, choose_system
    from dlbench.specs.requests import parse_set
    from dlbench.specs.resolve import available, find

    values = {key: (value, "--set") for key, value in parse_set(overrides).items()}
    workloads, systems = available("workloads"), available("systems")
    is_system = name in systems and name not in workloads
    if os.sep in name or name.endswith((".yaml", ".yml")):
        from dlbench.specs.yamlfile import read_yaml

        is_system = Path(name).is_file() and read_yaml(Path(name)).get("format") == "dlbench.system"
    elif name not in workloads and name not in systems:
        raise UserError(f"unknown workload or system {name!r}: {nearest(name, [*workloads, *systems])}")
    if is_system:
        if preset is not None:
            raise UserError(f"--preset {preset}: system {name} has no presets, workloads have")
        settings = {key.removeprefix("system."): value for key, value in values.items()}
        content = choose_system(name, settings).model_dump(mode="json")
    else:
        content = choose(WorkloadFile(find("workloads", name)), preset, values).model_dump(mode="json")
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    import io

    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # the order of the fields says more
    sink = io.StringIO()
    yaml.dump(content, sink)
    click.echo(sink.getvalue(), nl=False)
