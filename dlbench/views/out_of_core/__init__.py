"""Out of core: a subject of the scaling report, and what `dlbench memory plan` prints."""
