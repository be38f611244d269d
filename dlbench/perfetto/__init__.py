"""A run as a timeline that Perfetto opens, and the same rows as Parquet."""
