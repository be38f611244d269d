"""What the collective benchmark is asked to measure, and the costs of a network."""
