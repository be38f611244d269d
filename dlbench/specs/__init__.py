"""Choices in YAML become frozen, validated plans."""
