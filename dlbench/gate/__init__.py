"""The gate: is B slower than A, by how much, and with what confidence?"""
