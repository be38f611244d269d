"""All that forked processes use is loaded here once: every module of dlbench, its validators, and large libraries."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pandas
import scipy.stats
import torch._dynamo  # FSDP imports it
from pydantic import BaseModel

import dlbench
from tests.support import collective_ranks, exchange_ranks, forked_runs

__all__ = ["collective_ranks", "exchange_ranks", "forked_runs", "pandas", "scipy", "torch"]


def _models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


for _module in pkgutil.walk_packages(dlbench.__path__, "dlbench."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
for _model in _models(BaseModel):
    if _model.__module__.startswith("dlbench."):
        _model.model_rebuild()
