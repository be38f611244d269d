"""What tests share: factories of run folders, fakes at the boundary, fixtures, ranks of small programs."""
