"""What is known of the job of a run: what its log says, and what accounting says."""
