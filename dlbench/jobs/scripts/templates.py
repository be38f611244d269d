"""Templates of `slurm/` become text: undefined names are errors, and text from outside goes through a filter.

`sh` makes one word of the shell of it, `comment` what may stand in a comment: one line of printable characters.
"""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import jinja2

from dlbench import bundled


def render(template: str, **values: object) -> str:
    """A template of the bundled folder `slurm/`, filled in.

    Raises:
        jinja2.UndefinedError: the template uses a name that was not given (a defect of dlbench).
    """
    return _environment(bundled.folder("slurm")).get_template(template).render(**values)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  (shell and slurm.conf, not HTML; free text goes through the filter below)
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["comment"] = lambda value: "".join(c if c.isprintable() else " " for c in str(value))[:200]
    return environment
