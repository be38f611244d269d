"""The summary: a card for each group."""
