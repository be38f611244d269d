"""Which rank holds and reads which sample in which epoch: global, local and partial shuffling. Pure; no torch."""
