"""`dlbench history` and its commands."""
