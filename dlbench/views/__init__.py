"""The scaling report: one folder or module for each subject."""

OTHER_REPORTS = frozenset({"command_reports", "layer_parts", "out_of_core.plan", "storage"})
"""Modules with reports of other commands: they hold no view, and the scaling report does not import them."""
