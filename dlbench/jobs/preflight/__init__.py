"""A system before its first run: its file against Slurm, then a job of a minute that looks at every node."""
