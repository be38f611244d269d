"""Who sends what to whom in which step of a collective."""
