"""One attention call, in the order that data passes: problem, tiling, plan, tiled attention."""
