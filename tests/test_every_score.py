"""Every score by what its author promises, which a user's own is held to; the products of scores with other tables.

That each is right under every mask, in every dtype and kernel and with everything else is in ``test_every_kernel``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
import covering
from attnscore.testing import check_score
from cases import DTYPES, FRAMEWORKS, MASK, SCORE, SCORES, SOME_MASKS, Sizes
from harness import EXTRAS, make_call
from own_scores import OwnSquare

pytestmark = pytest.mark.usefixtures("small_tiles", "one_thread")

frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
scores = pytest.mark.parametrize("score", [score.name for score in SCORES])

# By pairs of all tables: test_every_kernel.py. These are products of three.
if covering.products:

    @frameworks
    @pytest.mark.parametrize("mask", list(MASK))
    @scores
    def test_under_every_mask(score: str, mask: str, framework: str) -> None:
        call = make_call(score, mask, "float32", in_turn(score, mask))
        call.check(call.run(framework))

    @frameworks
    @pytest.mark.parametrize("mask", [mask.name for mask in SOME_MASKS])
    @pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
    @scores
    def test_in_every_dtype(score: str, dtype: str, mask: str, framework: str) -> None:
        call = make_call(score, mask, dtype, in_turn(score, mask))
        call.check(call.run(framework))

    @frameworks
    @pytest.mark.parametrize("extras", [name or "nothing-else" for name in EXTRAS])
    @scores
    def test_with_bias_and_sink(score: str, extras: str, framework: str) -> None:
        call = make_call(score, "Causal-offset-batch", "float64", extras.replace("nothing-else", ""))
        call.check(call.run(framework))

    def in_turn(score: str, mask: str) -> str:
        """What else is in the call of a score under a mask."""
        return tuple(EXTRAS)[(list(SCORE).index(score) + list(MASK).index(mask)) % len(EXTRAS)]


@frameworks
@scores
def test_check_score(score: str, framework: str) -> None:
    """What a user calls for a score of his own holds for all of ours."""
    row = SCORE[score]
    sizes = row.sized(Sizes(queries=5, keys=7))
    rng = np.random.default_rng(1)
    arrays = {name: rng.uniform(0.5, 1.5, shape) for name, shape in row.shapes(sizes).items()}
    if framework == "torch":
        arrays = {name: torch.tensor(x) for name, x in arrays.items()}
    like = np.zeros(1) if framework == "numpy" else torch.zeros(1)
    check_score(row.make(**arrays), dim=row.dims[0], key_dim=row.dims[1], heads=4, like=like)


class _Softmaxed:
    """Not a score: what it gives to a pair depends on the other keys."""

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        s = ops.matmul(query, ops.matrix_transpose(key))
        return s - ops.max(s, axis=-1, keepdims=True)


class _WrongGradient(OwnSquare):
    def tile_gradient(self, ops: Any, query: Any, key: Any, grad: Any) -> Any:
        query_grad, key_grad, arrays = super().tile_gradient(ops, query, key, grad)
        return query_grad, 2 * key_grad, arrays


class _Changed:
    """The dot product, of which `change` makes what is no score."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return self.change(ops.matmul(query, ops.matrix_transpose(key)))


class _Vandal:
    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        query *= 2
        return ops.matmul(query, ops.matrix_transpose(key))


@pytest.mark.parametrize(
    ("score", "complaint"),
    [(_Softmaxed(), "block"), (_WrongGradient(np.array(0.3)), "gradient of key"), (_Vandal(), "changed")],
    ids=["mixes-keys", "wrong-gradient", "changes-its-input"],
)
def test_check_score_finds_mistakes(score: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_score(score)


@pytest.mark.parametrize("like", [np.zeros(1), torch.zeros(1)], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("change", "error", "got"),
    [
        (lambda s: s[..., 0, :], ats.ShapeError, r"\(2, 2, 1, 4\)"),
        (lambda s: s[0, 0, 0], ats.ShapeError, r"\(4, 4\)"),
        (lambda s: s[:1], ats.ShapeError, r"\(1, 2, 1, 4, 4\)"),
        (lambda s: s[None], ats.ShapeError, r"\(1, 2, 2, 1, 4, 4\)"),
        (lambda s: s > 0, ats.DtypeError, "bool"),
        (lambda s: s + 1j, ats.DtypeError, "complex"),
        (lambda s: s.tolist(), ats.FrameworkError, "list"),
    ],
    ids=["one-query", "fewer-axes", "first-batch-row", "more-axes", "booleans", "complex", "a-list"],
)
def test_check_score_says_what_a_call_says(change: Any, error: type, got: str, like: Any) -> None:
    # Tiles have 4 of the 5 queries and 4 of the 7 keys here.
    with pytest.raises(error, match=f"tile of _Changed: expected .*, got {got}"):
        check_score(_Changed(change), like=like)


def test_a_sum_has_a_gradient_where_all_its_terms_have() -> None:
    """In NumPy: without one nothing can be compared with it."""
    check_score(ats.Combination((_WithoutGradient(), "dot"), (1.0, 0.5)))


class _WithoutGradient:
    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return -ops.sum(ops.abs(ops.expand_dims(query, -2) - ops.expand_dims(key, -3)), axis=-1)
