"""What everything stands on: plain arguments, a cache, sizes, the layout of axes, threads."""
