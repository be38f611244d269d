"""dlbench: measures how well a GPU cluster trains deep networks, where the time goes and what limits it."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`open`, imported when it is asked for: `import dlbench` stays light."""
    if name == "open":
        from importlib import import_module

        return import_module("dlbench.frames").Runs
    raise AttributeError(f"module 'dlbench' has no attribute {name!r}")
