"""Which activations stay, leave the device or are recomputed: a simulator of one pass, and planners on it."""
