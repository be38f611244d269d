"""One rank of a pre-flight (`dlbench preflight`): what a run would find on its node, asked one by one."""
