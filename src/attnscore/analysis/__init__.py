"""What can be asked of attention besides its output: weights, summaries, cost."""
