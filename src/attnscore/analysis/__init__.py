"""Analysis of attention besides its output: weights, summaries, cost."""
