"""Ranks of one node exchange through shared memory."""
