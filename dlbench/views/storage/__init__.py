"""What storage gives to readers without training, beside what accelerators need of it (`dlbench io`)."""
