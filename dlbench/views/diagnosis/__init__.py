"""What `dlbench diagnose` prints: a document made of the views of the scaling report."""
