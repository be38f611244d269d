"""Plans become launch commands, batch scripts and Slurm jobs."""
