"""Records become numbers."""
