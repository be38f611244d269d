"""Reads the machine, never changes it: NVML, host counters, environment, clock offsets."""
