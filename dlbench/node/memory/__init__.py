"""Training with activations that do not fit: blocks of a network, what they keep, and where the rest is meanwhile."""
