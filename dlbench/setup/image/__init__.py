"""A virtual environment becomes one file, which nodes of a job unpack for themselves."""
