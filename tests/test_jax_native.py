"""JAX programs and the native kernels: custom calls that XLA makes alone, and the callback where these are missing."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnscore as ats
from attnscore.backends.jax import ffi
from attnscore.base import threads, thresholds
from attnscore.masks.dynamic_intervals import traced_visibility
from attnscore.problem.problem import build_problem
from cases import DTYPES, in_turn, needs_native
from covering import some
from harness import EXTRAS, make_call

pytestmark = needs_native
RNG = np.random.default_rng(5)


def normal(*shape: int) -> Any:
    """Of float64, or float32 where JAX is narrow."""
    return jnp.asarray(RNG.standard_normal(shape))


def inputs(*examples: int) -> tuple[Any, Any, Any]:
    """Two batches, four heads on two KV heads."""
    return normal(*examples, 2, 4, 9, 5), normal(*examples, 2, 2, 11, 5), normal(*examples, 2, 2, 11, 3)


def close(got: Any, wanted: Any, tolerance: float = 1e-11) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one, "f8"), np.asarray(other, "f8"), atol=tolerance, rtol=tolerance)


def program(function: Any, *arguments: Any) -> str:
    return jax.jit(function).lower(*arguments).as_text()


def square(*arrays: Any, **options: Any) -> Any:
    return (ats.attend(*arrays, **options) ** 2).sum()


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the library was built without jaxlib."""
    ffi.registered()
    with monkeypatch.context() as changed:
        changed.setattr(ffi, "registered", lambda: False)
        yield


@pytest.fixture(params=[False, True], ids=["own call", "callback"])
def callback_too(request: pytest.FixtureRequest) -> bool:
    if request.param:
        request.getfixturevalue("callback")
    return bool(request.param)


@pytest.fixture
def narrow() -> Iterator[None]:
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


# ------------------------------------------------------- which way a program takes


def test_the_library_here_has_the_calls() -> None:
    """Without them all works, but slower: the library is to be built where jaxlib is."""
    assert ffi.registered()


def test_a_program_calls_the_library_itself() -> None:
    arrays = inputs()
    text = program(jax.grad(square, (0, 1, 2)), *arrays)
    assert text.count("@attnscore_forward") == text.count("@attnscore_backward") == 1
    assert "callback" not in text


@pytest.mark.parametrize("statistics", [False, True])
def test_outputs_without_a_use_have_no_gradient_in_the_program(statistics: bool) -> None:
    """The backward gets query, key, value, what the forward saved and one gradient, no zeros for the other outputs."""

    def loss(*arrays: Any) -> Any:
        found = ats.attend(*arrays, return_stats=statistics)
        return ((found[0] if statistics else found) ** 2).sum()

    text = program(jax.grad(loss, (0, 1, 2)), *inputs())
    (operands,) = re.findall(r"@attnscore_backward\(([^)]*)\)", text)
    assert operands.count("%") == 7


def test_without_the_calls_a_program_goes_through_python(callback: None) -> None:
    text = program(jax.grad(square, (0, 1, 2)), *inputs())
    assert "attnscore" not in re.sub(r"loc\(.*\)", "", text) and "callback" in text


def test_a_library_without_the_calls_is_told_from_one_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, importlib.util.find_spec("math"), importlib.util.find_spec("_ctypes")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=found: found)
        assert not ffi.registered.__wrapped__()


CALLS: dict[str, Any] = {
    "causal": lambda a, n, key: ats.attend(*a, mask=ats.Causal("bottom_right"), return_stats=True),
    "lengths": lambda a, n, key: ats.attend(*a, valid_lens=n, return_stats=("entropy",)),
    "lengths of both": lambda a, n, key: ats.attend(*a, mask=ats.ValidLens(n, n // 2), return_stats=("entropy",)),
    "dropout": lambda a, n, key: ats.attend(*a, dropout=0.3, seed=key, return_stats=("log_sum_exp",)),
    "bias and sink": lambda a, n, key: ats.attend(*a, bias=a[0][..., :1] * a[1][:, :1, :, 0][:, :, None], sink=0.3),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow_rows("causal")
def test_both_ways_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, lens, key = inputs(), jnp.asarray([7, 0]), jax.random.key(2)

    def loss(arrays: Any, lens: Any, key: Any) -> Any:
        found = CALLS[name](arrays, lens, key)
        leaves = [jnp.where(jnp.isfinite(x), x, 0.0) for x in jax.tree.leaves(found)]
        return sum((x**2).sum() for x in leaves), found

    def both() -> Any:
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays, lens, key)

    own = both()
    monkeypatch.setattr(ffi, "registered", lambda: False)
    close(own, both(), 1e-13)


# ------------------------------------------------------- traced lengths


def _cumulative(n: Any, most: int) -> Any:
    return jnp.sort(jnp.append(0, jnp.clip(n, 0, most)))


MASKS: dict[str, Any] = {
    "lengths": ats.ValidLens,
    "lengths per query": lambda n: ats.ValidLens(n[:, None] - jnp.arange(9)),
    "lengths of both": lambda n: ats.ValidLens(n, n // 2),
    "floats": lambda n: ats.ValidLens(n.astype("float32")),
    "a range": lambda n: ats.KeyRange(n // 3, n),
    "a range, half known": lambda n: ats.KeyRange(n, 9),
    "causal": lambda n: ats.Causal(offset=n),
    "a window": lambda n: ats.SlidingWindow(3, 2, offset=n),
    "an open window": lambda n: ats.SlidingWindow(None, 2, offset=n),
    "a wide window": lambda n: ats.SlidingWindow(2**60, None, offset=n),
    "a prefix": ats.PrefixLM,
    "packed": lambda n: ats.Packed(_cumulative(n, 9), _cumulative(n, 11)),
    "packed, causal": lambda n: ats.Packed(_cumulative(n, 9), [0, 5, 11]).causal("bottom_right"),
    "packed, a window": lambda n: ats.Packed([0, 2, 9], _cumulative(n, 11)).window(2, 2**60, "top_left"),
    "several": lambda n: ats.PrefixLM(n) & ats.Causal("bottom_right") & ats.KeyRange(1, n + 2) & ats.ValidLens([11, 4]),
}


@pytest.mark.parametrize("mask", MASKS)
def test_intervals_in_the_program_are_those_of_the_mask(mask: str, narrow: None) -> None:
    arrays = inputs()

    def ends(numbers: Any) -> Any:
        problem, _ = build_problem(*arrays, mask=MASKS[mask](numbers))
        found, rest = traced_visibility(problem.ops, problem.score_shape, problem.value, problem.mask)
        assert rest is None
        return found

    traced = jax.jit(ends)
    for numbers in ([2, 7], [0, 11], [-5, 40], [2**30, -(2**30)]):
        known = MASKS[mask](np.asarray(numbers, np.int32))
        interval_set = ats.masks.split_intervals(known, 9, 11, 2)[0]
        wanted = None if interval_set is None else interval_set.single
        assert wanted is not None
        start, stop, first, last = (np.broadcast_to(x, (2, 9)) for x in (*traced(jnp.asarray(numbers)), *wanted))
        alive = last > first
        np.testing.assert_array_equal(stop > start, alive)
        for got, want in ((start, first), (stop, last)):
            np.testing.assert_array_equal(np.where(alive, got, 0), np.where(alive, want, 0), err_msg=str(numbers))


HOLED: dict[str, Any] = {
    "sinks": lambda n: ats.KeyRange(0, 2) & ats.Causal("bottom_right") | ats.SlidingWindow(2, 0, offset=n),
    "two ranges": lambda n: ats.KeyRange(0, n // 3) | ats.KeyRange(n, 11),
    "an empty one": lambda n: ats.KeyRange(n, n) | ats.KeyRange(4, 6),
    "one inside": lambda n: ats.KeyRange(n, 9) | ats.ValidLens(11),
    "all but a window": lambda n: ~ats.SlidingWindow(1, 1, offset=n),
    "neither": lambda n: ~(ats.KeyRange(1, 3) | ats.SlidingWindow(1, 1, offset=n)),
    "known and traced": lambda n: (ats.KeyRange(0, 2) | ats.KeyRange(4, 6) | ats.KeyRange(8, 10)) & ~ats.KeyRange(n, 9),
}


@pytest.mark.slow
@some(
    "mask,callback_too",
    [*((mask, False) for mask in HOLED), ("sinks", True), ("known and traced", True)],
    [(mask, callback) for mask in HOLED for callback in (False, True)],
    indirect=("callback_too",),
)
def test_traced_numbers_between_pieces(mask: str, callback_too: bool) -> None:
    """In the program, and where it comes back to Python; also under vmap; with gradients."""
    arrays = inputs()

    def loss(arrays: Any, numbers: Any, **options: Any) -> Any:
        return square(*arrays, mask=HOLED[mask](numbers), **options)

    traced = jax.jit(jax.value_and_grad(loss))
    dense = jax.jit(jax.value_and_grad(lambda a, n: loss(a, n, kernel="dense")))
    mapped = jax.jit(jax.vmap(lambda n: loss(arrays, n)))
    if not callback_too:
        assert "@attnscore_forward" in program(loss, arrays, jnp.asarray([2, 7]))
    for numbers in ([2, 7], [0, 11], [-5, 40], [6, 3]):
        # Ends of ranges that are known are checked.
        n = jnp.asarray(numbers)
        n = n if "window" in mask or mask in ("sinks", "neither") else n.clip(0, 11)
        wanted = dense(arrays, n)
        close(traced(arrays, n), wanted, 1e-10)
        close(mapped(jnp.stack([n, n[::-1]]))[0], wanted[0], 1e-10)


EVALUATED: dict[str, Any] = {
    "two documents": lambda q, k: ats.Documents(q, k) & ats.Documents(q % 2, k % 2),
    "or documents": lambda q, k: ats.Documents(q, k) | ats.Causal("bottom_right"),
    "beside documents and padding": lambda q, k: (
        ats.Documents(q, k)
        & ats.MaskFunction(lambda b, h, i, j: (i + 2 * j + h) % 5 < 3)
        & ats.KeyPadding(k > -1)
        & ats.ValidLens(k[:, 0] + 7)
    ),
    "a function of traced ids": lambda q, k: ats.MaskFunction(lambda b, h, i, j, k: (i + k[b, j]) % 3 > 0, (k,)),
    "arrays, larger together": lambda q, k: ats.Dense(q[:, None, :, None] > 0) & ats.Dense(k[:, None, None] < 2),
    "alike for all rows": lambda q, k: ats.KeyPadding(k > 0) | ats.KeyPadding(k == -1),
}


def evaluated(mask: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any, Any]:
    """A loss, its arrays and ids, and what the dense kernel gives; the mask is evaluated strip by strip."""
    monkeypatch.setattr(thresholds, "CHUNK_BYTES", 1)
    monkeypatch.setattr(thresholds, "CHUNK_ROWS", 4)
    arrays = *inputs(), normal(4, 9, 11)
    ids = jnp.asarray(RNG.integers(-1, 3, (2, 9))), jnp.asarray(RNG.integers(-1, 3, (2, 11)))

    def loss(arrays: Any, ids: Any, **options: Any) -> Any:
        query, key, value, bias = arrays
        out, stats = ats.attend(query, key, value, mask=EVALUATED[mask](*ids), bias=bias, return_stats=True, **options)
        return (out**2).sum() + (stats.entropy**2).sum() + (stats.log_sum_exp * (stats.sum_weights > 0)).sum()

    wanted = jax.jit(jax.value_and_grad(lambda a, n: loss(a, n, kernel="dense")))(arrays, ids)
    return loss, arrays, ids, wanted


@pytest.mark.slow
@some("mask", ["alike for all rows"], list(EVALUATED))
def test_masks_that_a_plain_call_evaluates(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, arrays, ids, wanted = evaluated(mask, monkeypatch)
    close(jax.value_and_grad(loss)(arrays, ids, kernel="native"), wanted, 1e-10)


@pytest.mark.slow
@some("mask", ["beside documents and padding", "alike for all rows"], list(EVALUATED))
def test_masks_that_have_to_be_evaluated(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strip by strip in the program, with gradients, also in the layout of Flax and under vmap."""
    loss, arrays, ids, wanted = evaluated(mask, monkeypatch)
    assert "@attnscore_forward" in program(loss, arrays, ids)
    close(jax.jit(jax.value_and_grad(loss))(arrays, ids), wanted, 1e-10)
    turned = (*(x.swapaxes(1, 2) for x in arrays[:3]), arrays[3])
    close(jax.jit(lambda *a: loss(*a, head_axis=-2))(turned, ids), wanted[0], 1e-10)
    several = tuple(jnp.stack([x, x[::-1]]) for x in ids)
    close(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(arrays, several)[0][0], wanted[1][0], 1e-10)


@pytest.mark.slow
def test_dropout_under_a_mask_that_has_to_be_evaluated_is_left_to_the_stream() -> None:
    arrays = inputs()
    ids = jnp.asarray(RNG.integers(-1, 3, (2, 9))), jnp.asarray(RNG.integers(-1, 3, (2, 11)))

    def call(ids: Any, **options: Any) -> Any:
        return ats.attend(*arrays, mask=EVALUATED["or documents"](*ids), dropout=0.3, seed=5, **options)

    assert "@attnscore_forward" not in program(call, ids)
    wanted = jax.jit(lambda ids: call(ids, kernel="dense"))(ids)
    for found in (call(ids, kernel="native"), jax.jit(call)(ids)):
        close(found, wanted)


def test_a_mask_that_is_no_interval_goes_beside_the_intervals() -> None:
    arrays, seen, lens = inputs(), jnp.asarray(RNG.random((2, 1, 9, 11)) < 0.7), jnp.asarray([7, 3])

    def call(seen: Any, lens: Any, **options: Any) -> Any:
        return ats.attend(*arrays, mask=ats.Dense(seen) & ats.Causal("bottom_right"), valid_lens=lens, **options)

    close(jax.jit(call)(seen, lens), jax.jit(lambda *a: call(*a, kernel="dense"))(seen, lens))
    assert "@attnscore_forward" in program(call, seen, lens)


def test_documents_with_narrow_ids(narrow: None) -> None:
    arrays = inputs()
    ids = jnp.asarray(RNG.integers(-1, 3, (2, 9))), jnp.asarray(RNG.integers(-1, 3, (2, 11)))

    def call(ids: Any, **options: Any) -> Any:
        return ats.attend(*arrays, mask=ats.Documents(*ids), **options)

    wanted = jax.jit(lambda ids: call(ids, kernel="dense"))(ids)
    for found in (call(ids, kernel="native"), jax.jit(call)(ids)):
        close(found, wanted, 1e-5)


# ------------------------------------------------------- vmap


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0), (None, 0, None)])
@pytest.mark.slow_rows("axes0", "axes2", "axes1")
def test_examples_are_one_call(axes: tuple[Any, ...]) -> None:
    stacked = inputs(3)
    arrays = [x if axis == 0 else x[0] for x, axis in zip(stacked, axes, strict=True)]
    mapped = jax.vmap(lambda *a: ats.attend(*a, mask=ats.Causal("bottom_right")), axes)

    def one_by_one(*arrays: Any) -> Any:
        every = [[x[i] if axis == 0 else x for x, axis in zip(arrays, axes, strict=True)] for i in range(3)]
        return jnp.stack([ats.attend(*each, mask=ats.Causal("bottom_right"), kernel="dense") for each in every])

    seed = normal(3, 2, 4, 9, 3)

    def both(function: Any) -> Any:
        def whole(*arrays: Any) -> Any:
            out, pullback = jax.vjp(function, *arrays)
            return out, pullback(seed)

        return jax.jit(whole)(*arrays)

    wanted = both(one_by_one)
    close(mapped(*arrays), wanted[0])
    close(both(mapped), wanted)
    text = program(mapped, *arrays)
    assert text.count("@attnscore_forward") == 1 and "while" not in text


def test_examples_of_examples() -> None:
    arrays = normal(3, 2, 4, 9, 5), normal(3, 2, 4, 11, 5), normal(3, 2, 4, 11, 3)
    close(jax.vmap(jax.vmap(ats.attend))(*arrays), ats.attend(*arrays))


@pytest.mark.slow
def test_each_example_has_its_lengths_and_its_seed() -> None:
    arrays, seeds, lens = inputs(3), jax.random.split(jax.random.key(0), 3), jnp.asarray([[3, 11], [0, 5], [11, 1]])

    def loss(query: Any, key: Any, value: Any, seed: Any, lens: Any) -> Any:
        return square(query, key, value, dropout=0.4, seed=seed, valid_lens=lens)

    both = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    wanted = [both(*(x[i] for x in (*arrays, seeds, lens))) for i in range(3)]
    close(jax.jit(jax.vmap(both))(*arrays, seeds, lens), jax.tree.map(lambda *x: jnp.stack(x), *wanted))


@pytest.mark.slow
def test_second_derivatives_of_each_example() -> None:
    query, key, value = normal(3, 2, 3), normal(4, 3), normal(4, 2)

    def loss(query: Any, kernel: str = "auto") -> Any:
        return (ats.attend(query, key, value, kernel=kernel) ** 3).sum()

    dense = jax.jit(jax.hessian(lambda x: loss(x, "dense")))
    wanted = jnp.stack([dense(x) for x in query])
    close(jax.jit(jax.vmap(jax.jacrev(jax.grad(loss))))(query), wanted)

    def along(kernel: str) -> Any:
        return jax.jit(lambda x: jax.jvp(jax.vmap(lambda x: loss(x, kernel)), (x,), (x,)))(query)

    close(along("auto"), along("dense"))


# ------------------------------------------------------- layouts, sizes, transformations


@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_layout_of_flax_is_read_where_it_lies(key_heads: int) -> None:
    arrays = normal(2, 9, 4, 5), normal(2, 11, key_heads, 5), normal(2, 11, key_heads, 3)
    turned = tuple(x.swapaxes(1, 2) for x in arrays)
    wanted = jax.jit(jax.value_and_grad(square, (0, 1, 2)))(*turned)
    both = jax.jit(jax.value_and_grad(lambda *a: square(*a, head_axis=-2), (0, 1, 2)))
    value, grads = both(*arrays)
    close((value, tuple(x.swapaxes(1, 2) for x in grads)), wanted)
    text = jax.jit(lambda *a: ats.attend(*a, head_axis=-2)).lower(*arrays).compile().as_text()
    (operands,) = re.findall(r"custom-call\(([^)]*)\)", text)
    # Queries whose heads are split into groups are turned by XLA; nothing else moves.
    assert [x.strip().startswith("%a_") for x in operands.split(",")] == [key_heads == 4, True, True]


def test_the_program_of_a_tiny_layer_is_its_products_and_one_call() -> None:
    """No copy of an operand, and no operation on the lengths."""
    arrays = normal(2, 1, 8), normal(2, 10, 8), normal(2, 10, 8), normal(8, 8), jnp.asarray([3, 7])

    def layer(query: Any, key: Any, value: Any, W: Any, lens: Any) -> Any:
        return ats.attend(query @ W, key @ W, value, score=ats.Additive(W[0]), valid_lens=lens, kernel="native")

    text = jax.jit(layer).lower(*arrays).compile().as_text().split("ENTRY")[1]
    operations = re.findall(r"= [^=]*? (fusion|custom-call|copy|broadcast|dot)\(", text)
    assert operations.count("custom-call") == 1
    # The products, the row of W, and the copy to the result.
    assert len(operations) <= 5


@pytest.mark.parametrize("shape", [(2,), (2, 9), (2, 1), (1, 9)])
@pytest.mark.slow_rows("shape[12]", "shape3", "shape0")
def test_lengths_are_clipped_by_the_call(shape: tuple[int, ...], narrow: None) -> None:
    """Lengths of each batch row or query, of any value; in plans, under vmap, with gradients."""
    arrays = inputs()

    def loss(lens: Any, **options: Any) -> Any:
        return jax.value_and_grad(square, (0, 1, 2))(*arrays, valid_lens=lens, **options)

    native, dense = (jax.jit(lambda lens, name=name: loss(lens, kernel=name)) for name in ("native", "dense"))
    many = RNG.integers(-3, 15, (4, *shape)).astype(np.int32)
    many[0].flat[:2] = -(2**31), 2**31 - 1
    for lens in map(jnp.asarray, many):
        close(native(lens), dense(lens.clip(0, 11)), 1e-4)
    close(jax.vmap(native)(jnp.asarray(many)), jax.vmap(dense)(jnp.asarray(many).clip(0, 11)), 1e-4)


@pytest.mark.parametrize(
    ("queries", "keys", "batch"), [(0, 5, 2), (5, 0, 2), (5, 5, 0), (1, 1, 1), (7, 129, 1), (67, 3, 1)]
)
def test_odd_sizes(queries: int, keys: int, batch: int) -> None:
    arrays = normal(batch, 2, queries, 3), normal(batch, 1, keys, 3), normal(batch, 1, keys, 2)
    options: dict[str, Any] = {"valid_lens": [keys // 2] * batch}
    found, grads = jax.jit(jax.value_and_grad(lambda a: square(*a, kernel="native", **options)))(arrays)
    out, pullback = ats.attend_vjp(*map(np.asarray, arrays), kernel="streaming", **options)
    close(found, jnp.asarray((out**2).sum()))
    close(grads, tuple(map(jnp.asarray, pullback(2 * out)[:3])))


def test_scan_and_checkpoint() -> None:
    query, key, value = inputs()
    queries = jnp.stack([query, -query])

    def loss(queries: Any) -> Any:
        def step(total: Any, query: Any) -> Any:
            out = jax.checkpoint(ats.attend)(query, key, value)
            return total + (out**2).sum(), out

        return jax.lax.scan(step, 0.0, queries)

    wanted = jax.jit(jax.value_and_grad(lambda q: sum(square(x, key, value) for x in q)))(queries)
    (value_, _), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(queries)
    close((value_, grad), wanted)


def test_a_program_can_be_exported() -> None:
    arrays = inputs()
    allowed = [jax.export.DisabledSafetyCheck.custom_call("attnscore_forward")]
    exported = jax.export.export(jax.jit(ats.attend), disabled_checks=allowed)(*arrays)
    close(jax.export.deserialize(exported.serialize()).call(*arrays), ats.attend(*arrays))


def test_the_number_of_threads_changes_nothing_and_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, received = inputs(), []
    before, call = ats.get_num_threads(), jax.jit(ats.attend)
    monkeypatch.setattr(threads, "_followers", [*threads._followers])
    threads.follow(received.append)
    try:
        found = []
        for count in (1, 2):
            ats.set_num_threads(count)
            found.append(np.asarray(call(*arrays)))
    finally:
        ats.set_num_threads(before)
    np.testing.assert_array_equal(*found)
    assert received[:3] == [before, 1, 2]


# ------------------------------------------------------- the border


def _attributes(**changed: Any) -> dict[str, Any]:
    return {
        "form": "inner", "activation": "tanh", "negative_slope": 0.0, "scale": 1.0, "caps": (), "dropout": 0.0,
        "seed": 0, "present_operands": 7, "transposed": 0, "requested_results": 7,
    } | changed  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "shapes", "words"),
    [
        ({}, {"key": (1, 1, 1, 5, 3)}, r"key: expected shape \(1, 1, 1, 5, 4\)"),
        ({}, {"out": (1, 1, 1, 3, 7)}, r"out: expected shape"),
        ({}, {"top": (1, 1, 1, 2, 1)}, r"row_max: expected shape"),
        ({"present_operands": 3}, {}, "present_operands: expected one bit for each buffer"),
        ({"present_operands": 15}, {}, "query_bias: expected a buffer"),
        ({"requested_results": 23}, {}, "attention_scores: expected a buffer"),
        ({"form": "outer"}, {}, "form: expected one of 'inner'"),
        ({"dropout": 1.5}, {}, r"dropout: expected a number in \[0, 1\)"),
        ({"caps": (-1.0, 1.0)}, {}, "caps: expected caps above 0"),
    ],
)
def test_what_does_not_fit_is_refused(changed: Any, shapes: Any, words: str) -> None:
    """Programs may come from a file, so every call is checked."""
    assert ffi.registered()
    sizes = {"query": (1, 1, 1, 3, 4), "key": (1, 1, 1, 5, 4), "value": (1, 1, 1, 5, 2), "out": (1, 1, 1, 3, 2)}
    sizes |= shapes
    arrays = [jnp.zeros(sizes[name], "float32") for name in ("query", "key", "value")]
    column = (1, 1, 1, 3, 1)
    results = [(sizes["out"], "float32"), (sizes.get("top", column), "float32"), (column, "float32")]
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(ffi.call("forward", results, arrays, _attributes(**changed)))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([5, 1, 1, 1, 3, 4], "shapes: expected one for each buffer"),
        ([-1], "shapes: expected one for each buffer"),
        ([5, 1, 1, 1, 3], "shapes: expected one for each buffer"),
        ([5, 1, 1, 1, 5, 4] * 6, "expected the axes of vmap, then those of its shape"),
        ([2, 3, 4, 2, 5, 4, 2, 5, 2, 2, 3, 2, 2, 3, 1, 2, 3, 1], "out: expected at least 5 axes"),
    ],
)
def test_shapes_that_are_not_those_of_the_buffers_are_refused(shapes: list[int], words: str) -> None:
    """Of a known digest too: a plan takes buffers of its sizes alone."""
    arrays = [jnp.zeros(shape, "float32") for shape in ((3, 4), (5, 4), (5, 2))]
    results = [((1, 1, 1, 3, 2), "float32"), *[((1, 1, 1, 3, 1), "float32")] * 2]
    passed = {name: ffi._attribute(value) for name, value in _attributes().items()}
    wanted = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 2), (3,), (3,))]
    known = [[5, 1, 1, 1, *x] for x in ((3, 4), (5, 4), (5, 2), (3, 2), (3, 1), (3, 1))]

    def run(shapes: list[int], *given: Any, digest: int) -> Any:
        call = jax.ffi.ffi_call("attnscore_forward", wanted)
        return jax.block_until_ready(call(*given, shapes=np.asarray(shapes), digest=np.int64(digest), **passed))

    assert ffi.registered()
    ffi.call("forward", results, [x[None, None, None] for x in arrays], _attributes())
    run([n for shape in known for n in shape], *arrays, digest=77)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=words):
        run(shapes, *arrays, digest=78)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="expected"):
        run([n for shape in known for n in shape], arrays[0], arrays[1][:4], arrays[2], digest=77)


# ------------------------------------------------------- plans of the library


def test_a_repeated_call_reads_its_arrays_and_ends_anew(narrow: None) -> None:
    """A plan is made at the first run; the gradients of a run are not added to the last run's."""
    w_v = normal(5)

    def loss(arrays: Any, lens: Any, w_v: Any, **options: Any) -> Any:
        out, stats = ats.attend(
            *arrays, score=ats.Additive(w_v), valid_lens=lens, sink=w_v[:4], return_stats=True, **options
        )
        return (out**2).sum() + (stats.entropy**2 + stats.log_sum_exp).sum()

    native, dense = (
        jax.jit(jax.value_and_grad(lambda *a, o=options: loss(*a, **o), (0, 2)))
        for options in ({"kernel": "native"}, {"kernel": "dense"})
    )
    for numbers in ([7, 3], [11, 1], [2, 9]):
        given = inputs(), jnp.asarray(numbers), w_v
        close(native(*given), dense(*given), 1e-4)


@pytest.mark.slow
def test_the_seed_is_no_part_of_a_plan() -> None:
    arrays = inputs()
    for seed in (1, 2):
        wanted = ats.attend(*arrays, dropout=0.5, seed=seed, kernel="dense")
        close(jax.jit(lambda *a, seed=seed: ats.attend(*a, dropout=0.5, seed=seed))(*arrays), wanted)


def test_ends_of_intervals_are_checked_in_each_call() -> None:
    assert ffi.registered()
    arrays = [jnp.zeros(shape, "float32") for shape in ((1, 1, 1, 3, 4), (1, 1, 1, 5, 4), (1, 1, 1, 5, 2))]
    column = (1, 1, 1, 3, 1)
    results = [((1, 1, 1, 3, 2), "float32"), (column, "float32"), (column, "float32")]

    def run(start: int, stop: int, dtype: str) -> Any:
        ends = [jnp.full((1, 3), end, dtype) for end in (start, stop)]
        given = 7 | 1 << 9 | 1 << 10
        return jax.block_until_ready(
            ffi.call("forward", results, [*arrays, *ends], _attributes(present_operands=given))
        )

    for dtype in ("int32", "int64"):
        for start, stop, words in (
            (-1, 2, "start: expected numbers from 0"),
            (1, 6, "up to key_len = 5"),
            (3, 2, "on"),
        ):
            assert float(run(1, 4, dtype)[2][0, 0, 0, 0, 0]) == pytest.approx(np.log(3))
            with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=words):
                run(start, stop, dtype)


def test_plans_are_told_apart_by_more_than_their_shapes(narrow: None) -> None:
    """Calls of the same arrays that differ in scale, cap, slope, mask, form, heads in place of batches, or dtypes."""
    arrays, w_v, lens = inputs(), normal(5), jnp.asarray([7, 0])
    leaky = ats.Additive(w_v, activation="leaky_relu", negative_slope=0.3)
    calls: list[Any] = [
        lambda *a, **o: ats.attend(*a, score=ats.ScaledDot(0.5), **o),
        lambda *a, **o: ats.attend(*a, score=ats.ScaledDot(0.25), **o),
        lambda *a, **o: ats.attend(*a, score=ats.SoftCap(ats.ScaledDot(0.25), 1.0), **o),
        lambda *a, **o: ats.attend(*a, score="gaussian", **o),
        lambda *a, **o: ats.attend(*a, score=ats.Additive(w_v), **o),
        lambda *a, **o: ats.attend(*a, score=leaky, **o),
        lambda *a, **o: ats.attend(*a, score=ats.Additive(w_v, activation="leaky_relu", negative_slope=0.1), **o),
        lambda *a, **o: ats.attend(*a, valid_lens=lens, **o),
        lambda *a, **o: ats.attend(*a, mask=ats.KeyRange(lens, 9), **o),
        lambda *a, **o: ats.attend(*(x.astype("float16") for x in a), **o).astype("float32"),
        lambda *a, **o: ats.attend(*(x.swapaxes(0, 1) for x in (a[0][:, :2], *a[1:])), **o),
        lambda *a, **o: ats.attend(a[0][:, :2], *a[1:], **o),
    ]
    every = jax.jit(lambda *a: [call(*a, kernel="native") for call in calls])
    wanted = [call(*arrays, kernel="dense") for call in calls]
    for found in (every(*arrays), every(*arrays)):
        close(found, wanted, 5e-3)


@pytest.mark.slow
def test_more_calls_than_the_library_keeps_plans_for() -> None:
    arrays = normal(1, 3, 4), normal(70, 4), normal(70, 4)

    every = jax.jit(lambda q, k, v: [ats.attend(q, k[:n], v[:n]) for n in range(1, 71)])
    wanted = [ats.attend(arrays[0], *(x[:n] for x in arrays[1:])) for n in range(1, 71)]
    for _ in range(2):
        close(every(*arrays), wanted)


# ------------------------------------------------------- the tables


TURNS = in_turn(DTYPES, tuple(EXTRAS))


@some("score,mask,dtype,extras", TURNS[::30], TURNS, slow=TURNS[15::30])
@pytest.mark.slow_rows("scaled_dot-heads-MaskFunction-float32-weights")
def test_the_tables_in_programs(score: str, mask: str, dtype: str, extras: str) -> None:
    call = make_call(score, mask, dtype, extras)
    call.check(call.jax(jit=True))
