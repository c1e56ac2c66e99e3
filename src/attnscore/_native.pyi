"""The native CPU kernels (csrc/): what they take and fill. Absent from an installation without a C++ compiler.

Axes are the same everywhere; an axis of length 1 is broadcast where the text allows it::

    query                   (*lead, head, group, query_len, dim)        broadcast over heads, any strides
    key, value              (*lead, head, group, key_len, ...)          broadcast over heads, any strides
    query_bias, key_bias    (*lead, head, group, length, 1)             broadcast, any strides
    bias, mask              (*lead, head, group, query_len, key_len)    broadcast, any strides; mask: bytes, 0 hides
    query_ids, key_ids      (first of lead or 1, length), int64         any strides; both or neither
    start, stop             (first of lead or 1, query_len), int64      C-contiguous; both or neither
                            (1 + holes, first of lead or 1, query_len)  the first less the others, its holes
    weights                 (dim,) or (head or 1, group or 1, dim)      rows contiguous; additive only
    sink, scales            (head or 1, group or 1)                     any strides; scales: distance only
    out                     (*lead, head, group, query_len, value_dim)  C-contiguous; backward: any strides
    numbers of rows         (*lead, head, group, query_len, 1)          C-contiguous
    scores                  (*lead, head, group, query_len, key_len)    C-contiguous; additive only
    attention_scores, attention_weights     as the scores; of any form
    grad_attention_scores, grad_attention_weights   as the scores           broadcast, any strides
    grad_out                (*lead, head, group, query_len, value_dim)  any strides
    grad_query, grad_query_bias                 as the query; without the 1 in the end
    grad_key, grad_value, grad_key_bias, grad_weights (..., dim)        as the keys, but 1 in the axes of heads along
                                                which key, value, key_bias and weights are all broadcast
    grad_bias               the shape of the bias itself
    grad_sink, grad_scales  (*lead, head, group)

with one or more lead axes. bfloat16 and float16 arrays come as uint16, their bits. Numbers of rows, all scores and
attention weights, gradients, weights, biases of rows and keys, and the sink are in the sum type: float64 for float64
values, float32 otherwise. Gradients are C-contiguous and are added to (zero them first), but for grad_sink, which is
set.

A wrong dtype, or what is no array, raises TypeError; anything else that does not fit raises ValueError.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

_Array: TypeAlias = NDArray[Any]
_Optional: TypeAlias = _Array | None
_Score: TypeAlias = tuple[Any, ...]
"""Form ("inner", "additive", "distance"), activation, negative slope, scale, caps, dtypes of query and key, of value
and of bias, dropout, seed."""
_Inputs: TypeAlias = Sequence[_Optional]
"""query, key, value, query_bias, key_bias, bias, mask, query_ids, key_ids, start, stop, weights, sink, scales."""

def targets() -> list[str]:
    """The targets that this CPU runs, best first: of "avx512bf16", "avx512", "avx2" and "portable"."""

def current_target() -> str:
    """The target in use: the first, or what the environment variable ATTNSCORE_TARGET or `select` asks for."""

def select(name: str, /) -> None:
    """Use this target from now on."""

def forward(score: _Score, inputs: _Inputs, rows: Sequence[_Optional], threads: int, /) -> None:
    """Fill the rows.

    These are out, top, log_total = log sum exp(s - top) with the sink among the s, and what is not None of scores,
    attention_scores, attention_weights, max_score, mean_score, var_score, entropy, max_weight, sum_sq_weights and
    sum_weights. The scores are for `backward`: before biases and caps, and without a number where the intervals hide a
    pair. Attention scores are as they enter the softmax, -inf where masked; where they are wanted, all but top,
    log_total and out is left as for rows that see nothing. Attention weights are before dropout; at most one of the
    two is given.
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
    """Add to the gradients that are not None.

    They are those of query, key, value, query_bias, key_bias, bias, weights, sink and scales. `rows` are what the
    forward gave and what comes in: out, top, log_total, entropy, scores, attention_weights, grad_out,
    grad_log_sum_exp, grad_entropy, grad_attention_scores, grad_attention_weights. Without the scores they are computed
    again; attention_weights are given with their gradient.
    """

_Place: TypeAlias = _Array | int
"""The memory of an array, or its address; 0 is none. It must lie as the example did."""

class Plain:
    """Attention of query, key and value of given shapes and strides, and its gradient."""

    def __call__(
        self,
        query: _Place,
        key: _Place,
        value: _Place,
        out: _Place,
        weights: _Place,
        rows: _Place,
        scores: _Place,
        attention_weights: _Place,
        threads: int,
        /,
    ) -> None:
        """Fill `out`, and what is given of `rows`, `scores` (additive) and `attention_weights`.

        `rows` holds the top of all rows and then their log_total.
        """

    def backward(
        self,
        query: _Place,
        key: _Place,
        value: _Place,
        out: _Place,
        weights: _Place,
        rows: _Place,
        scores: _Place,
        attention_weights: _Place,
        grad_out: _Place,
        grad_attention_weights: _Place,
        grad_query: _Place,
        grad_key: _Place,
        grad_value: _Place,
        grad_weights: _Place,
        threads: int,
        /,
    ) -> None:
        """Add to the gradients, which are in the sum type and in C order.

        `grad_out` lies as `out` does, and `grad_attention_weights`, where it is given, as `attention_weights`.
        """

def prepared(score: _Score, arrays: Sequence[_Optional], /) -> Plain:
    """Check examples of query, key, value and out, with weights, start and stop or None, as `forward` does.

    The result runs on others of the same shapes and strides, with the same start and stop.
    """
