"""The scaling report: one folder for each subject, listed in `registry`."""
