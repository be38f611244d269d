"""The gate: is B slower than A, by how much, and how sure is that?

Every run gives one number for each metric. `sides` says what may be compared and reads runs, `baseline` a baseline
file; `comparison` brings both sides together, `verdicts` makes units of them (pairs, sessions), tests and decides,
`report` is what that gives as plain data, and `page` prints it.
"""
