"""attnscore: attention scoring functions and attention pooling, exact, masked correctly, in O(n) memory.

Importing this imports NumPy alone; frameworks are reached through the arrays that the caller brings.
"""

from attnscore.analysis.explain import Cost, available, cost, explain
from attnscore.analysis.functional import masked_softmax, merge, softmax_jacobian, softmax_pullback
from attnscore.analysis.summaries import TopWeights, key_mass, pooled_weights, top_weights
from attnscore.analysis.weights import attention_scores, attention_weights
from attnscore.api import Gradients, attend, attend_vjp
from attnscore.base.threads import get_num_threads, set_num_threads
from attnscore.errors import (
    ArgumentError,
    AttnscoreError,
    DeviceError,
    DtypeError,
    FileError,
    FrameworkError,
    KernelUnavailable,
    MaskError,
    ShapeError,
)
from attnscore.kv_cache import KeyValueCache
from attnscore.masks import (
    Causal,
    Dense,
    Documents,
    IntervalMask,
    KeyPadding,
    KeyRange,
    Mask,
    MaskFunction,
    Neighbours,
    Packed,
    PrefixLM,
    SlidingWindow,
    ValidLens,
)
from attnscore.packing import pack, pack_padded, unpack, unpack_padded
from attnscore.plans.prepared import PreparedKeys, prepare_keys
from attnscore.problem.normalizers import Entmax
from attnscore.problem.relative import relative_buckets, relative_positions
from attnscore.problem.statistics import AttentionStats
from attnscore.scores import (
    Additive,
    Bilinear,
    Combination,
    Cosine,
    Dot,
    Gaussian,
    ScaledDot,
    SoftCap,
    Sum,
    Temperature,
    TritonTile,
    register_score,
)

__version__ = "0.1.0"

__all__ = [
    "Additive",
    "ArgumentError",
    "AttentionStats",
    "AttnscoreError",
    "Bilinear",
    "Causal",
    "Combination",
    "Cosine",
    "Cost",
    "Dense",
    "DeviceError",
    "Documents",
    "Dot",
    "DtypeError",
    "Entmax",
    "FileError",
    "FrameworkError",
    "Gaussian",
    "Gradients",
    "IntervalMask",
    "KernelUnavailable",
    "KeyPadding",
    "KeyRange",
    "KeyValueCache",
    "Mask",
    "MaskError",
    "MaskFunction",
    "Neighbours",
    "Packed",
    "PrefixLM",
    "PreparedKeys",
    "ScaledDot",
    "ShapeError",
    "SlidingWindow",
    "SoftCap",
    "Sum",
    "Temperature",
    "TopWeights",
    "TritonTile",
    "ValidLens",
    "attend",
    "attend_vjp",
    "attention_scores",
    "attention_weights",
    "available",
    "cost",
    "explain",
    "get_num_threads",
    "key_mass",
    "masked_softmax",
    "merge",
    "pack",
    "pack_padded",
    "pooled_weights",
    "prepare_keys",
    "register_score",
    "relative_buckets",
    "relative_positions",
    "set_num_threads",
    "softmax_jacobian",
    "softmax_pullback",
    "top_weights",
    "unpack",
    "unpack_padded",
]

# TensorFlow's AutoGraph rewrites calls in a tf.function; this is how its ``do_not_convert`` says "leave it as it is".
for _function in (attend, attention_scores, attention_weights, explain, key_mass, masked_softmax, merge, pack,
                  pack_padded, pooled_weights, prepare_keys, softmax_jacobian, softmax_pullback, top_weights, unpack,
                  unpack_padded):  # fmt: skip
    _function.autograph_info__ = {}  # type: ignore[union-attr]
del _function
