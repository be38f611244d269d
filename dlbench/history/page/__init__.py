"""What `dlbench history` prints, and the trends report."""
