"""Making data sets: recipes, worker processes, journal, manifest."""
