"""What `dlbench compare` and `dlbench check` print."""
