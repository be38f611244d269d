"""What a data set is on disk; no torch."""
