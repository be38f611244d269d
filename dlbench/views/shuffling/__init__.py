"""Shuffling: the audit of who read what, and epoch times of local and partial against global shuffling."""
