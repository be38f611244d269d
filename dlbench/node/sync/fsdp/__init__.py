"""Sharded training by PyTorch FSDP2, and its collectives made visible."""
