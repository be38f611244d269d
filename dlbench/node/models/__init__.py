"""Networks and optimizers."""
