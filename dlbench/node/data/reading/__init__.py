"""How samples are read: readers chosen by measurement, the state of the page cache, what each epoch read, pure rates."""
