"""The seed of everything that draws runs anew."""

SEED = 20_150_815
"""Fixed, so that the same runs give the same interval, byte for byte."""
