"""Where activations are while a device has no room for them: a file (CPU), page-locked host memory (GPU)."""
