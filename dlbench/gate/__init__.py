"""The gate: is B slower than A, by how much, and with what confidence?

`sides` reads runs, `baseline` a file; `comparison` matches points, `verdicts` tests units, `page` prints the `report`.
"""
