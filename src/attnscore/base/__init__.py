"""Base of all other packages: arguments, a cache, thresholds, the layout of axes, threads."""
