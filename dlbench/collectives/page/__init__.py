"""The report of the collective benchmark."""
