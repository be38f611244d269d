"""`dlbench comm` and its commands."""
