"""Density volumes: fields, containers, power spectrum."""
