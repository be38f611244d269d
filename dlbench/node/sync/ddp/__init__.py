"""PyTorch DistributedDataParallel as an engine."""
