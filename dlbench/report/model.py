"""Transitional: these stand in `dlbench.views.model` now."""

from dlbench.reading.attribution import Part as Part
from dlbench.reading.scaling import Point as Point
from dlbench.report.formats.json import as_plain as as_plain
from dlbench.views.model import Environment as Environment
from dlbench.views.model import EnvironmentDifference as EnvironmentDifference
from dlbench.views.model import Group as Group
from dlbench.views.model import Report as Report
from dlbench.views.model import RunRow as RunRow
