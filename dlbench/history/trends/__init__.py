"""Series over nights: change points and drifts, slow hosts by month."""
