"""Reading: from which tier bytes came, cold and warm epochs, readers, and whether fetching or preparing takes them."""
