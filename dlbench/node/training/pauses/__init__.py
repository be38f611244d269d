"""Where training stands still: evaluations, checkpoints, and an end that was asked for."""
