"""Horovod as an engine, and what its library tells of the exchange."""
