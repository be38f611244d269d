"""What happened: run folders, records, their scan."""
