"""Numbers become something a person or a program reads."""
