"""CUDA on this machine, as far as it shows without torch."""
