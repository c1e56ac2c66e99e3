"""The native CPU kernels (csrc/): what they take and fill. Absent from an installation without a C++ compiler.

Axes are the same everywhere; an axis of length 1 before the last two is broadcast where the text allows it::

    query, grad_out        (*lead, head, group, query_len, dim or value_dim)    broadcast, any strides
    key, value             (*lead, head, group, key_len, dim or value_dim)      broadcast, any strides
    out, grad_query        (*lead, head, group, query_len, value_dim or dim)    full, C-contiguous
    statistics             (*lead, head, group, query_len, 7)                   full, C-contiguous
    top, log_total, shift  (*lead, head, group, query_len)                      full, C-contiguous
    grad_key, grad_value   (*lead, head, 1 or group, key_len, ...)              full, C-contiguous
    grad_weights           (*lead, head, 1 or group, dim)                       full, C-contiguous; additive only
    start, stop            (first of lead or 1, query_len), int64               C-contiguous; both or neither
    weights                (dim,) or (head or 1, group or 1, dim)               rows contiguous; additive only

with one or more lead axes. bfloat16 and float16 arrays come as uint16, their bits. Numbers of rows, gradients and
weights are in the sum type: float64 for float64 values, float32 otherwise. Gradients are added to: zero them first. The
gradients of a key head that a group of query heads shares (group axis 1) are the sum over the group.

A wrong dtype, or what is no array, raises TypeError; anything else that does not fit raises ValueError.
"""

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Array: TypeAlias = NDArray[Any]
_Integers: TypeAlias = NDArray[np.int64]
_Form: TypeAlias = Literal["inner", "additive"]
_Activation: TypeAlias = Literal["tanh", "sigmoid", "relu", "leaky_relu"]
_Dtype: TypeAlias = Literal["float32", "float64", "bfloat16", "float16"]

STATISTICS: int
"""Numbers of a row that `forward` writes."""

def targets() -> list[str]:
    """The targets that this CPU runs, best first: of "avx512", "avx2" and "portable"."""

def current_target() -> str:
    """The target in use: the first, or what the environment variable ATTNSCORE_TARGET or `select` asks for."""

def select(name: str) -> None:
    """Use this target from now on."""

def get_num_threads() -> int:
    """Threads of a call with ``threads=0``: OMP_NUM_THREADS, or the CPUs that this process may use."""

def set_num_threads(n: int) -> None: ...
def forward(
    query: _Array,
    key: _Array,
    value: _Array,
    out: _Array,
    statistics: _Array,
    start: _Integers | None,
    stop: _Integers | None,
    weights: _Array | None,
    *,
    form: _Form,
    activation: _Activation,
    negative_slope: float,
    scale: float,
    score_dtype: _Dtype,
    value_dtype: _Dtype,
    full_statistics: bool,
    threads: int,
) -> None:
    """Fill `out` and `statistics`.

    Of each row: the largest score s, sum e, sum e (s - max), sum e^2, count, mean s, sum (s - mean)^2, where
    e = exp(s - max), over the keys start <= j < stop; the first two only without `full_statistics`.
    """

def backward(
    query: _Array,
    key: _Array,
    value: _Array,
    grad_out: _Array,
    top: _Array,
    log_total: _Array,
    shift: _Array,
    start: _Integers | None,
    stop: _Integers | None,
    weights: _Array | None,
    grad_query: _Array,
    grad_key: _Array,
    grad_value: _Array,
    grad_weights: _Array | None,
    *,
    form: _Form,
    activation: _Activation,
    negative_slope: float,
    scale: float,
    score_dtype: _Dtype,
    value_dtype: _Dtype,
    grad_dtype: _Dtype,
    threads: int,
) -> None:
    """Add to the gradients.

    A weight is p = exp(s - top - log_total), with log_total = inf where a row sees nothing; the gradient of its score
    is p (grad_out . v + shift), with shift = (gradient of log_sum_exp) - grad_out . out.
    """
