"""Staging: how samples were brought to the nodes, how long that took, and when it pays."""
