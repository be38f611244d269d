"""The collective benchmark's results: fits, predictions, and its report."""
