"""Ways to share a training out over ranks, priced by one model: what none of them has run is marked so."""
