"""Series over nights: change points, rank sums, slow hosts by month."""
