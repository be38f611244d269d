"""What runs on compute nodes."""
