"""Makes a machine ready and says what it lacks."""
