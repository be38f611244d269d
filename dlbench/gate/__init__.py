"""The gate: is B slower than A, by how much, and with what confidence?

Every run gives one number for each metric. `sides` reads runs, `baseline` a baseline file; `comparison` matches the
points of both sides, `verdicts` tests units (pairs, sessions), `report` holds the result as data, `page` prints it.
"""
