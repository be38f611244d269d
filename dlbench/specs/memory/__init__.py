"""Training with activations that do not fit: settings, the chain of a network as it was measured, and plans on it."""
