"""Attention over a sequence that is divided among machines: the shards, and the rows that ranks exchange.

`attnscore.parallel.torch` and `attnscore.parallel.jax` compute; this package itself imports no framework.
"""

from attnscore.parallel.chunks import attend_chunks
from attnscore.parallel.explanation import ParallelExplanation, explain
from attnscore.parallel.mask import shard_mask
from attnscore.parallel.plan import Exchange, exchange
from attnscore.parallel.shard import Shard, balanced_shards, consecutive_shards

__all__ = [
    "Exchange",
    "ParallelExplanation",
    "Shard",
    "attend_chunks",
    "balanced_shards",
    "consecutive_shards",
    "exchange",
    "explain",
    "shard_mask",
]
