"""What `dlbench diagnose` prints: a report on runs made of fewer views, each printed in full."""
