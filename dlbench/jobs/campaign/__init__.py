"""A series of Slurm jobs: what it shall hold is on disk before the first one, and it can be completed at any time."""
