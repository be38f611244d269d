"""Data sets become batches of tensors."""
