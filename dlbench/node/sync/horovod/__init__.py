"""Horovod as an engine, and what its library gives of the exchange."""
