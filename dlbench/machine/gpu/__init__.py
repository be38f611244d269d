"""The GPUs of this machine as CUDA will show them, and where they are; known without torch."""
