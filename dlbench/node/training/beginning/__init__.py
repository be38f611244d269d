"""Where training begins: weights of a checkpoint."""
