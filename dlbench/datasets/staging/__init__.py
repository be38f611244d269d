"""Samples are brought near before they are read: tiers, capacity, copying, keeping. No torch."""
