"""The Triton kernel: attention on NVIDIA GPUs, one source for all forms, forward and backward, without atomics."""
