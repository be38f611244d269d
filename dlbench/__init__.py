"""dlbench: measures how well a GPU cluster trains deep networks, where the time goes and what limits it."""

__version__ = "0.1.0"
