"""The device of a rank: which one, whose else, beside which cores, and by what ways NCCL reaches the others'."""
