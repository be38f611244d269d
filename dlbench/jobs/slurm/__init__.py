"""Slurm's own programs: sbatch, squeue, sacct, asked politely and never believed on doubt."""
