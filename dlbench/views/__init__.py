"""The scaling report: one package or module for each subject."""

NO_VIEW = frozenset({"command_reports", "layer_parts", "storage", "out_of_core.numbers", "out_of_core.plan"})
NO_VIEW |= {"out_of_core.view", "sweep.choice", "sweep.numbers", "sweep.settings", "sweep.updates", "sweep.view"}
"""Modules that hold no view and that the scaling report imports only if it shows them, or not at all."""
