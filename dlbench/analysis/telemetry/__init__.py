"""Turns the samples written next to the ranks into power, clocks and energy of the measured steps."""
