"""Images of the ranks' environment in a batch script: which there are, and where their Pythons will be. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dlbench.jobs.scripts import containers
from dlbench.jobs.scripts.job import Job
from dlbench.specs.plan import LaunchPlan
from dlbench.specs.system.image import ImageSpec

FOLDER = "dlbench_images"
"""The script's variable for the folder of each node in which images are unpacked, each under its number from 1."""

STEP = "dlbench-image"
"""What accounting calls the step that holds the images on the nodes, beside those of the runs."""


def values_of(job: Job) -> dict[str, object]:
    """What the script's part for images is filled in with."""
    return {"images": images_of(job), "image_folder": _folder(job.shape.system.image.folder), "image_step": STEP}


def images_of(job: Job) -> Sequence[ImageSpec]:
    """The images that runs of a job need, each once."""
    found = {plan.system.image.sha256: plan.system.image for plan in job.plans if plan.system.image.file is not None}
    return tuple(found.values())


def python_of(job: Job, plan: LaunchPlan, unpacked: str, python: str) -> str:
    """The Python of a plan's ranks.

    Args:
        job: the plan's.
        plan: of the run.
        unpacked: stands for the folder of the images.
        python: that of the nodes, unless the system names another.
    """
    if plan.system.image.file is None:
        return containers.python_of(plan, plan.system.python or python)
    numbers = {image.sha256: number for number, image in enumerate(images_of(job), start=1)}
    return f"{unpacked}/{numbers[plan.system.image.sha256]}/env/bin/python"


def _folder(path: str) -> str:
    """A folder of each node as a word of the shell; it may begin with a variable."""
    if not path.startswith("$"):
        return shlex.quote(path.rstrip("/"))
    name, _, rest = path[1:].partition("/")
    otherwise = ":-/tmp" if name == "TMPDIR" else ":?is not set in this job: image.folder"
    return f'"${{{name}{otherwise}}}"' + (f"/{shlex.quote(rest.rstrip('/'))}" if rest.strip("/") else "")
