"""What training costs in allocated time: hours of ranks for a million samples."""
