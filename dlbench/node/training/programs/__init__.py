"""The network as a program: compiled, or captured as CUDA graphs."""
