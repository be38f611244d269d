"""What samplers wrote next to the ranks becomes power, clocks and energy of the measured steps."""
