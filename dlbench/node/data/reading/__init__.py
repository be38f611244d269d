"""How samples are read: readers chosen by measurement, the page cache, what each epoch read, rates without training."""
