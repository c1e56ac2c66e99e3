"""Private names of TensorFlow: read in one file, and a release without one of them computes the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import attnscore as ats
from attnscore.backends.tensorflow import graphs, private
from renamed import run_without, take_away

FILE = Path(private.__file__)
SOURCE = FILE.read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r'"(tensorflow\.[\w.]+)"', SOURCE)))
DELETED = [name.rstrip(".") for name in NAMES if name != private.LITE]
"""Names whose objects can be deleted; of TensorFlow Lite the module itself is looked for."""
RNG = np.random.default_rng(3)
SCORE_ARRAYS = {"w_v": (4,), "W_q": (4, 3), "W_k": (4, 3)}
Arrays = list[tf.Tensor]


@pytest.fixture(params=[*(pytest.param([name], marks=pytest.mark.slow) for name in NAMES), NAMES], ids=[*NAMES, "all"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that a release of TensorFlow does not have, with their replacements in the module."""
    take_away(private, request.param, monkeypatch)
    return list(request.param)


def test_nothing_is_missing_here() -> None:
    assert len(NAMES) > 7
    assert private.FALLBACKS == {}


def test_no_other_file_imports_a_private_module() -> None:
    package = FILE.parents[2]
    importing = {p for p in package.rglob("*.py") if re.search(r"^\s*(from|import) tensorflow\.python", p.read_text())}
    assert importing == set()


def arrays() -> Arrays:
    shapes = ((2, 3, 3), (2, 5, 3), (2, 5, 2), *SCORE_ARRAYS.values())
    return [tf.constant(RNG.standard_normal(shape)) for shape in shapes]


def additive(query: Any, key: Any, value: Any, *parameters: Any, kernel: str = "auto") -> Any:
    score = ats.Additive(**dict(zip(SCORE_ARRAYS, parameters, strict=True)))
    return ats.attend(query, key, value, score=score, valid_lens=[2, 5], kernel=kernel)


def gradients(function: Callable[..., Any], leaves: Arrays) -> Arrays:
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        loss = tf.reduce_sum(function(*leaves) ** 3)
    return list(tape.gradient(loss, leaves))


def second_gradients(function: Callable[..., Any], leaves: Arrays) -> Arrays:
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        loss = tf.add_n([tf.reduce_sum(x * x) for x in gradients(function, leaves)])
    return list(tape.gradient(loss, leaves))


def test_a_missing_name_changes_no_result(missing: list[str]) -> None:
    leaves = arrays()

    def dense(*leaves: Any) -> Any:
        return additive(*leaves, kernel="dense")

    def of_both(calculate: Callable[..., Arrays]) -> None:
        expected = calculate(dense, leaves)
        for _ in range(2):  # the second time by a plan, where there is one
            for got, x in zip(calculate(additive, leaves), expected, strict=True):
                np.testing.assert_allclose(got, x, rtol=0, atol=1e-9)

    of_both(lambda function, leaves: [function(*leaves)])
    of_both(gradients)
    of_both(second_gradients)
    of_both(lambda function, leaves: tf.function(lambda *leaves: gradients(function, list(leaves)))(*leaves))
    with tf.autodiff.ForwardAccumulator(leaves[0], tf.ones_like(leaves[0])) as forward:
        got = additive(*leaves)
    with tf.autodiff.ForwardAccumulator(leaves[0], tf.ones_like(leaves[0])) as expected:
        exact = dense(*leaves)
    np.testing.assert_allclose(forward.jvp(got), expected.jvp(exact), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "names", [*(pytest.param([name], marks=pytest.mark.slow) for name in DELETED), DELETED], ids=[*DELETED, "all"]
)
def test_a_renamed_name_leaves_right_gradients_and_is_listed(names: list[str]) -> None:
    """Eagerly, in a graph, and in a graph that ``tf.vectorized_map`` rewrites."""
    calls = """
import numpy as np, tensorflow as tf, attnscore
arrays = [tf.constant(np.random.default_rng(i).standard_normal((3, 1, 5, 4))) for i in range(3)]
def define(q, k, v):
    return tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 2), v)
def gradients(function):
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        out = function(*arrays)
        loss = tf.reduce_sum(out ** 2)
    return [out, *tape.gradient(loss, arrays)]
graph = tf.function(attnscore.attend)
for function in (attnscore.attend, graph, lambda *x: tf.vectorized_map(lambda x: graph(*x), x)):
    for got, expected in zip(gradients(function), gradients(define), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-9)
"""
    run_without("tensorflow", names, calls)


def test_where_recomputing_is_not_recognised_dropout_needs_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient by another dropout mask would be wrong without a word."""
    x = tf.ones((1, 4, 2))
    ats.attend(x, x, x, dropout=0.5)
    monkeypatch.setattr(private, "RECOMPUTING", frozenset())
    with pytest.raises(ats.FrameworkError, match="seed: expected a seed"):
        ats.attend(x, x, x, dropout=0.5)
    ats.attend(x, x, x, dropout=0.5, seed=1)


def test_functions_that_rewrite_are_found_by_public_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TensorFlow has one of them elsewhere, each graph counts as rewritten."""
    assert private.rewriting_packages() is not None and private.RECOMPUTING
    seen: list[bool] = []
    tf.vectorized_map(lambda x: seen.append(graphs.is_rewritten()) or x, tf.ones((2, 3)))
    tf.recompute_grad(lambda x: seen.append(graphs.is_recomputed()) or x)(tf.ones(2))
    assert all(seen) and len(seen) > 1
    assert not graphs.is_rewritten() and not graphs.is_recomputed()
    monkeypatch.setattr(private, "_VECTORIZING", None)
    assert graphs.is_rewritten()
