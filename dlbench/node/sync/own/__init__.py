"""dlbench's own gradient exchange: buckets, routes, wire formats."""
