"""What programs of the compute side answer that are no runs: a profile, a reading rate, a look at a node."""
