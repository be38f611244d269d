"""A Slurm cluster on one machine, for tests and for trying batch scripts: `python -m tests.slurm_box --help`."""
