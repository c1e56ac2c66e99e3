"""Statistics of every attention call of a PyTorch model while it runs."""
