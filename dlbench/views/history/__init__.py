"""What changed over months, beside the runs of a report."""
