"""What samplers wrote beside the ranks becomes power, clocks and energy of the measured steps."""
