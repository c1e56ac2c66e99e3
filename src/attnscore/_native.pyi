"""The native CPU kernels (csrc/). Absent from an installation without a C++ compiler.

Axes are the same everywhere; an axis of length 1 is broadcast where the table says so::

    query                   (*lead, head, group, query_len, dim)        broadcast over heads, any strides
    key, value              (*lead, head, group, key_len, ...)          broadcast over heads, any strides
    query_bias, key_bias    (*lead, head, group, length, 1)             broadcast, any strides
    bias, mask              (*lead, head, group, query_len, key_len)    broadcast, any strides; mask: bytes, 0 masks
    query_ids, key_ids      (first of lead or 1, length), int64         any strides; both or neither
    start, stop             (first of lead or 1, query_len), int64      C-contiguous; both or neither
                            (1 + holes, first of lead or 1, query_len)  the first is the interval, the others its holes
    w_v                     (dim,) or (head or 1, group or 1, dim)      rows contiguous; additive only
    sink, scales            (head or 1, group or 1)                     any strides; scales: distance only
    out                     (*lead, head, group, query_len, value_dim)  C-contiguous; backward: any strides
    statistics of rows      (*lead, head, group, query_len, 1)          C-contiguous
    scores                  (*lead, head, group, query_len, key_len)    C-contiguous; additive only
    attention_scores, attention_weights     as the scores; of any form
    grad_attention_scores, grad_attention_weights   as the scores           broadcast, any strides
    grad_out                (*lead, head, group, query_len, value_dim)  any strides
    grad_query, grad_query_bias                 as the query; without the 1 in the end
    grad_key, grad_value, grad_key_bias, grad_w_v (..., dim)            as the keys, but 1 in the axes of heads along
                                                which key, value, key_bias and w_v are all broadcast
    grad_bias               the shape of the bias itself
    grad_sink, grad_scales  (*lead, head, group)

with one or more lead axes. bfloat16 and float16 arrays are passed as uint16, their bits. Statistics of rows, all
scores and attention weights, gradients, w_v, biases of rows and keys, and the sink are in the sum type: float64 for
float64 values, float32 otherwise. Gradients are C-contiguous and are added to (zero them first), except grad_sink,
which is set.

A wrong dtype, or an object that is no array, raises TypeError; any other invalid argument raises ValueError.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

_Array: TypeAlias = NDArray[Any]
_Optional: TypeAlias = _Array | None
_Score: TypeAlias = tuple[Any, ...]
"""Form ("inner", "additive", "distance"), activation, negative slope, scale, caps, dtypes of query and key, of value
and of bias, dropout, the first row and all rows of a matrix (0: those of the call) where it is a chunk, seed."""
_Inputs: TypeAlias = Sequence[_Optional]
"""query, key, value, query_bias, key_bias, bias, mask, query_ids, key_ids, start, stop, w_v, sink, scales."""

def targets() -> list[str]:
    """Return the compiled targets that this CPU runs, best first.

    On x86-64 of "avx512bf16", "avx512", "avx2" and "portable", on 64-bit Arm of "neon_bf16" and "neon".
    """

def targets_left_out() -> list[str]:
    """Return the targets that this CPU could run and the module does not have, best first."""

def current_target() -> str:
    """Return the target in use: the first, unless ATTNSCORE_TARGET in the environment or `select` names another."""

def select(name: str, /) -> None:
    """Use this target in all later calls."""

def use_openmp(gomp_parallel: int, /) -> None:
    """Set the OpenMP runtime by the address of `GOMP_parallel`. Calls with a negative `threads` take its threads."""

def forward(score: _Score, inputs: _Inputs, rows: Sequence[_Optional], threads: int, /) -> None:
    """Run attention and fill `rows`.

    `rows` are out, row_max, log_denom = log sum exp(s - row_max) with the sink among the s, and those not None of
    scores, attention_scores, attention_weights, and the statistics in the order of their table (`problem.statistics`)
    but with log_sum_exp at the end. `scores` are saved for `backward`: before biases and caps, and unset where an
    interval masks a pair. `attention_scores` are as they enter the softmax, -inf where masked; where they are wanted,
    every other result is as for fully masked rows. `attention_weights` are before dropout; at most one of the two is
    given.
    """

def backward(
    score: _Score,
    inputs: _Inputs,
    rows: Sequence[_Optional],
    grad_dtype: str,
    gradients: Sequence[_Optional],
    threads: int,
    /,
) -> None:
    """Add to the gradients that are not None; those of query, key, value and w_v are always wanted.

    They are those of query, key, value, query_bias, key_bias, bias, w_v, sink and scales. `rows` are what the
    forward gave and what comes in: out, row_max, log_denom, entropy, scores, attention_weights, grad_out,
    grad_log_sum_exp, grad_entropy, grad_attention_scores, grad_attention_weights. Without the scores they are computed
    again; attention_weights are given with their gradient.
    """

def set_tensor_types(types: tuple[type, ...], exchange_api: Any, /) -> bool:
    """Read the tensors of these types by the capsule that is their ``__dlpack_c_exchange_api__``, where it is known."""

def signature(arrays: Sequence[Any], /) -> bytes | None:
    """Return kinds, dtypes, shapes and strides of arrays of NumPy and tensors; None where one cannot be read.

    Read are arrays of exactly these types, with aligned memory of the CPU, of a dtype that the machine has.
    """

def decoding_signature(arrays: Sequence[Any], head_axis: int, /) -> bytes | None:
    """Return what calls of a `DecodingPlan` share; None where there is no such plan.

    `arrays` are query, key, value and, where there is one, a boolean mask or valid lengths. The result is their
    `signature` without the number of keys, and without the strides of key, value and mask.
    """

def copy_valid_lens(lens: Any, to: NDArray[Any], most: int, /) -> bool:
    """Copy int32 or int64 lengths (batch,) or (batch, query) to `to`, (batch, query); whether all are in 0..most."""

def is_all_finite(array: Any, /) -> bool | None:
    """Return whether every entry is finite; None for arrays that are not read here, or not in C order."""

def multiply_rows(x: Any, matrix: Any, to: NDArray[Any], threads: int, /) -> bool:
    """Write ``x @ matrix`` to `to`, and NaN for rows of `x` that hold NaN or infinity.

    False, with `to` undefined, where an array is not read here: all are float32 or
    all float64 and not empty, the matrix has two axes, the other two arrays are in C order.
    """

class _Plan:
    def allocate_and_run(
        self,
        arrays: tuple[Any, ...],
        lens: tuple[Any, ...],
        empty: Callable[[Any, Any], Any],
        layouts: tuple[tuple[Any, Any], ...],
        seed: int,
        threads: int,
        /,
    ) -> tuple[Any, ...] | None:
        """Return new arrays ``empty(*layout)`` that a forward has filled; None where a length is not in 0..key_len.

        `arrays` are inputs as in a call. `lens` is empty, or holds valid lengths as in `copy_valid_lens`, which take
        the place of start and stop.
        """

class CallPlan(_Plan):
    """A forward or a backward whose arrays were checked once, for other memory of the same shapes and strides."""

    def __call__(self, arrays: tuple[Any, ...], seed: int, threads: int, /) -> None:
        """Run on arrays or tensors, whose shapes and strides are not checked again.

        `arrays` are all that were given, in the order of the arguments. One that is misaligned or has less memory than
        the example raises ValueError, as does a wrong number of arrays. `seed` replaces that of the score.
        """

def plan_forward(score: _Score, inputs: _Inputs, rows: Sequence[_Optional], /) -> CallPlan:
    """Check examples of the arrays as `forward` does, but row_max and log_denom may be None.

    Only shapes and strides are read of them, and the numbers of start and stop, to check them; a run may have others.
    """

class DecodingPlan(_Plan):
    """A forward whose number of keys, and strides of key, value and mask, are read from the arrays of each run."""

def plan_decoding(
    score: _Score, inputs: _Inputs, rows: Sequence[_Optional], has_heads: bool, length_before_heads: bool, /
) -> DecodingPlan:
    """Check examples of the arrays as `plan_forward` does.

    A run gets key, value and mask on the caller's axes, (..., head, length, dim), without `head` unless `has_heads`;
    with `length_before_heads` key and value are (..., length, head, dim).
    """

def plan_backward(
    score: _Score, inputs: _Inputs, rows: Sequence[_Optional], grad_dtype: str, gradients: Sequence[_Optional], /
) -> CallPlan:
    """Check examples of the arrays as `backward` does. A run sets the gradients where `backward` adds to them."""
