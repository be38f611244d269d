"""Measured times become the costs of a network: latency, bandwidth, per-byte work."""
