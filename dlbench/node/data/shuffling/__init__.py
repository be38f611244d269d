"""Local and partial shuffling on one rank: its order, the exchange of samples, and the audit of all reading."""
