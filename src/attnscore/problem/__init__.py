"""One call, checked, on the canonical axes: masks, scores, dropout, statistics, and the online softmax."""
