"""`dlbench data` and its commands."""
