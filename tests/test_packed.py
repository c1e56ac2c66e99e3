"""Packed batches: equal to each sequence alone, forward and backward; helpers, jagged tensors, traced lengths."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import attnscore as ats
from bad_input.table import Maker
from covering import pairs

LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "odd": ([5, 1, 7, 3], [3, 1, 9, 6]),
    "empty ones": ([0, 5, 0, 2, 0], [4, 0, 0, 3, 1]),
    "one": ([7], [5]),
    "none of all": ([0, 0], [0, 0]),
    "longer than a tile": ([70, 130, 1], [129, 64, 65]),
}
SCORES: dict[str, Callable[[], Any]] = {
    "dot": ats.ScaledDot,
    "additive": lambda: ats.Additive(torch.linspace(-1, 1, 5, dtype=torch.float64)),
    "gaussian": lambda: ats.Gaussian(1.5),
}
MASKS: dict[str, tuple[Callable[[ats.Packed], ats.Mask], ats.Mask | None]] = {
    "all": (lambda packed: packed, None),
    "causal": (lambda packed: packed.causal("bottom_right"), ats.Causal("bottom_right")),
    "window": (lambda packed: packed.window(3, 1, "top_left"), ats.SlidingWindow(3, 1, "top_left")),
}
JAGGED = {"layout": torch.jagged, "dtype": torch.float64, "requires_grad": True}


def cumulative(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths])


def draw(lengths: list[int], *axes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths) + sum(axes))
    return [torch.randn(n, *axes, dtype=torch.float64, generator=generator).requires_grad_() for n in lengths]


def close(found: Any, wanted: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=atol)


@pairs(score=tuple(SCORES), mask=tuple(MASKS), lengths=tuple(LENGTHS), kernel=("auto", "streaming", "dense"))
def test_a_packed_batch_is_each_sequence_alone(score: str, mask: str, lengths: str, kernel: str) -> None:
    packed_mask, own_mask = MASKS[mask]
    queries, (keys, values) = draw(LENGTHS[lengths][0], 4, 5), (draw(LENGTHS[lengths][1], 2, d) for d in (5, 3))

    def both(attend: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        outs = attend()
        loss = sum(((out + s) ** 2).sum() for s, out in enumerate(outs))
        return [*outs, *torch.autograd.grad(loss, [*queries, *keys, *values], allow_unused=True)]

    def alone() -> list[torch.Tensor]:
        return [
            ats.attend(q, k, v, score=SCORES[score](), mask=own_mask, head_axis=-2)[0]
            for q, k, v in zip(*([x[None] for x in xs] for xs in (queries, keys, values)), strict=True)
        ]

    def packed() -> list[torch.Tensor]:
        (query, cu_query), (key, cu_key), (value, _) = map(ats.pack, (queries, keys, values))
        out = ats.attend(
            query[None], key[None], value[None], score=SCORES[score](), mask=packed_mask(ats.Packed(cu_query, cu_key)),
            head_axis=-2, kernel=kernel,
        )  # fmt: skip
        return ats.unpack(out[0], cu_query)

    for found, wanted in zip(both(packed), both(alone), strict=True):
        close(found.detach(), wanted.detach())


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
def test_positions_behind_the_last_sequence(kernel: str) -> None:
    """Such queries give 0, and such keys, NaN too, reach no query."""
    x = torch.randn(9, 4, dtype=torch.float64)
    x[6:] = torch.nan
    out = ats.attend(torch.nan_to_num(x), x, x, mask=ats.Packed([0, 2, 6]), kernel=kernel)
    assert (out[6:] == 0).all() and out[:6].isfinite().all()
    close(out[:2], ats.attend(x[:2], x[:2], x[:2]))


def test_causal_needs_no_alignment_where_lengths_are_equal() -> None:
    cu = [0, 3, 3, 8]
    for one in (ats.Packed(cu).causal(), ats.Packed(cu, cu).causal(), ats.Packed(cu) & ats.Causal()):
        wanted = ats.Packed(cu).causal("bottom_right").materialize(8, 8)
        np.testing.assert_array_equal(one.materialize(8, 8), wanted)
        intervals = one.intervals(8, 8)
        assert intervals is not None and (intervals[1] - intervals[0])[0].tolist() == [1, 2, 3, 1, 2, 3, 4, 5]


WINDOWS = {
    "causal": (lambda packed, align: packed.causal(align), ats.Causal),
    "window": (lambda packed, align: packed.window(1, 1, align), lambda align: ats.SlidingWindow(1, 1, align)),
}


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("cu_key", "fits"),
    [
        ([0, 1, 4], ("top_left", "bottom_right")),
        ([0, 1, 6], ("top_left",)),
        ([0, 3, 6], ("bottom_right",)),
        ([0, 3, 4], ()),
        ([0, 4, 4], ("top_left",)),
    ],
    ids=str,
)
def test_a_window_of_the_whole_array_is_that_of_each_sequence_or_an_error(
    cu_key: list[int], fits: tuple[str, ...], window: str, align: Any
) -> None:
    """It passes silently where no sequence has another diagonal than the array."""
    of_sequences, of_array = WINDOWS[window]
    packed, keys = ats.Packed([0, 1, 4], cu_key), cu_key[-1]
    masks = [packed & of_array(align), ats.Dense(np.ones((4, keys), bool)) & of_array(align) & packed]
    for mask in masks:
        if align in fits:
            wanted = of_sequences(packed, align).materialize(4, keys)
            np.testing.assert_array_equal(mask.materialize(4, keys), wanted)
        else:
            expected = (
                r"mask: expected the window of each sequence: Packed\(\.\.\.\)\.causal.* got Packed.* Hint: .*offset="
            )
            with pytest.raises(ats.MaskError, match=expected):
                mask.materialize(4, keys)


def test_an_offset_is_that_of_the_whole_array() -> None:
    found = ats.Packed([0, 1, 4], [0, 3, 4]) & ats.Causal(offset=0)
    assert found.materialize(4, 4)[0].astype(int).tolist() == [[1, 0, 0, 0], [0] * 4, [0] * 4, [0, 0, 0, 1]]


def test_lengths_that_the_host_cannot_read_need_the_window_of_each_sequence() -> None:
    x, cu = jnp.ones((4, 8)), jnp.array([0, 1, 4])
    with pytest.raises(ats.MaskError, match="expected the window of each sequence"):
        jax.jit(lambda cu: ats.attend(x, x, x, mask=ats.Packed(cu, [0, 1, 4]) & ats.Causal()))(cu)


def test_it_prints_itself() -> None:
    mask = ats.Packed([0, 1, 3], np.array([0, 3, 6])).causal("bottom_right")
    assert repr(mask) == "Packed(cu_query=[0, 1, 3], cu_key=[0, 3, 6], right=0, align='bottom_right')"


# ---------------------------------------------------------------- lengths that the host cannot read


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.slow_rows("all-streaming", "window-streaming", "causal-streaming")
def test_traced_lengths_in_jax(mask: str, kernel: str) -> None:
    """One compiled program serves every batch, forward and backward, and its lengths are never read by the host."""
    make = MASKS[mask][0]
    arrays = [jnp.asarray(x.detach().numpy()) for x in draw([9, 11, 11], 4)]

    def loss(arrays: Any, cu_query: Any, cu_key: Any) -> Any:
        out = ats.attend(*arrays, mask=make(ats.Packed(cu_query, cu_key)), kernel=kernel)
        return (out**2).sum(), out

    traced = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for cu_query, cu_key in (([0, 4, 4, 9], [0, 3, 5, 11]), ([0, 0, 1, 6], [0, 7, 7, 8])):
        found = traced(arrays, jnp.asarray(cu_query), jnp.asarray(cu_key))
        wanted = jax.value_and_grad(loss, has_aux=True)(arrays, np.array(cu_query), np.array(cu_key))
        jax.tree.map(close, found, wanted)
    assert traced._cache_size() == 1


@pytest.mark.slow
def test_traced_lengths_in_tensorflow() -> None:
    x = tf.constant(draw([9], 4)[0].detach().numpy())
    call = tf.function(
        lambda cu: ats.attend(x, x, x, mask=ats.Packed(cu).causal()), input_signature=[tf.TensorSpec([None], tf.int32)]
    )
    for cu in ([0, 4, 9], [0, 2, 2, 3, 8]):
        close(call(tf.constant(cu)), ats.attend(x, x, x, mask=ats.Packed(cu).causal()))


def test_lengths_of_a_vmap_in_torch() -> None:
    """Inside a transform the host reads no lengths: `visible` computes the mask in PyTorch's operations."""
    x = torch.randn(3, 9, 4, dtype=torch.float64)
    cu = torch.tensor([[0, 4, 9], [0, 0, 5], [0, 9, 9]])
    found = torch.vmap(lambda x, cu: ats.attend(x, x, x, mask=ats.Packed(cu).causal()))(x, cu)
    wanted = torch.stack([ats.attend(y, y, y, mask=ats.Packed(ends).causal()) for y, ends in zip(x, cu, strict=True)])
    close(found, wanted)


def test_an_alignment_is_required_where_lengths_cannot_be_compared() -> None:
    x = jnp.ones((4, 2))
    with pytest.raises(ats.MaskError, match=r"align: expected an alignment .* the host cannot compare"):
        jax.jit(lambda cu: ats.attend(x, x, x, mask=ats.Packed(cu, [0, 1, 4]).causal()))(jnp.array([0, 1, 4]))


# ---------------------------------------------------------------- helpers


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow", "jax"])
def test_helpers_in_every_framework(framework: str) -> None:
    make = Maker(framework)
    lengths = [3, 0, 2, 1]
    sequences = [make.floats(n, 2) for n in lengths]
    packed, cu = ats.pack(sequences)
    assert cu.tolist() == [0, 3, 3, 5, 6] and cu.dtype == np.int64 and type(packed) is type(sequences[0])
    close(packed, np.concatenate([np.asarray(x) for x in sequences]))
    for found, wanted in zip(ats.unpack(packed, cu), sequences, strict=True):
        close(found, wanted)
    padded = ats.unpack_padded(packed, cu)
    assert tuple(padded.shape) == (4, 3, 2)
    for row, wanted in zip(np.asarray(padded), sequences, strict=True):
        close(row[: len(wanted)], wanted)
        assert (row[len(wanted) :] == 0).all()
    again, ends = ats.pack_padded(padded, lengths)
    close(again, packed)
    np.testing.assert_array_equal(ends, cu)
    assert tuple(ats.unpack_padded(packed, cu, 5).shape) == (4, 5, 2)


def test_helpers_along_another_axis() -> None:
    sequences = [torch.randn(2, n, 3) for n in (4, 1)]
    packed, cu = ats.pack(sequences, axis=-2)
    assert packed.shape == (2, 5, 3)
    assert all(map(torch.equal, ats.unpack(packed, cu, axis=1), sequences))


def test_gradients_of_the_helpers() -> None:
    sequences = draw([3, 0, 2], 2)

    def there_and_back(*xs: torch.Tensor) -> torch.Tensor:
        packed, cu = ats.pack(xs)
        padded = ats.unpack_padded(packed, cu)
        again, _ = ats.pack_padded(padded**2, [3, 0, 2])
        return torch.cat([s * x for s, x in enumerate(ats.unpack(again, cu), 1)])

    assert torch.autograd.gradcheck(there_and_back, tuple(sequences))


@pytest.mark.slow
def test_helpers_in_a_jax_program() -> None:
    def loss(xs: Any) -> Any:
        packed, cu = ats.pack(xs)
        out = ats.attend(packed, packed, packed, mask=ats.Packed(cu))
        return sum(s * (x**2).sum() for s, x in enumerate(ats.unpack(out, cu), 1))

    def alone(xs: Any) -> Any:
        return sum(s * (ats.attend(x, x, x) ** 2).sum() for s, x in enumerate(xs, 1))

    xs = [jnp.asarray(x.detach().numpy()) for x in draw([3, 5], 4)]
    jax.tree.map(close, jax.jit(jax.value_and_grad(loss))(xs), jax.value_and_grad(alone)(xs))


_X = np.zeros((4, 2))
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no sequences": (lambda: ats.pack([]), ats.ArgumentError, "sequences: expected one array or more, got none"),
    "a list": (lambda: ats.pack([[1, 2]]), ats.FrameworkError, r"sequences\[0\]: expected an array"),
    "two frameworks": (lambda: ats.pack([_X, torch.ones(4, 2)]), ats.FrameworkError, "arrays of one framework"),
    "other sizes": (lambda: ats.pack([_X, _X.T]), ats.ShapeError, r"sequences\[1\]: expected the sizes \(2,\)"),
    "other dtypes": (
        lambda: ats.pack([_X, _X.astype(np.float32)]),
        ats.DtypeError,
        r"sequences\[1\]: expected the dtype of sequences\[0\] \(float64\), got float32",
    ),
    "no axis": (lambda: ats.pack([_X], axis=2), ats.ShapeError, r"sequences\[0\]: expected an axis 2"),
    "axis of a fraction": (
        lambda: ats.pack([_X], axis=0.0),
        ats.ArgumentError,
        r"axis: expected a whole number, got 0\.0",
    ),
    "axis None": (lambda: ats.pack([_X], axis=None), ats.ArgumentError, "axis: expected a whole number, got None"),
    "axis by name": (
        lambda: ats.unpack(_X, [0, 1], axis="x"),
        ats.ArgumentError,
        "axis: expected a whole number, got 'x'",
    ),
    "past the end": (lambda: ats.unpack(_X, [0, 5]), ats.MaskError, "cu: expected cumulative lengths up to 4, got 5"),
    "falling": (lambda: ats.unpack(_X, [0, 3, 2]), ats.MaskError, "cu: expected cumulative lengths"),
    "no vector": (lambda: ats.unpack(_X, 4), ats.ShapeError, r"cu: expected shape \(sequences \+ 1,\)"),
    "traced": (
        lambda: jax.jit(ats.unpack)(_X, np.array([0, 4])),
        ats.ArgumentError,
        "cu: expected numbers that the host can read",
    ),
    "lens of another batch": (lambda: ats.pack_padded(_X, [2]), ats.ShapeError, r"lens: expected shape \(4,\)"),
    "lens too long": (lambda: ats.pack_padded(_X, [3, 1, 1, 1]), ats.ArgumentError, "lens: expected numbers from 0 to"),
    "too short": (lambda: ats.unpack_padded(_X, [0, 4], 3), ats.ArgumentError, "length: expected at least 4"),
    "not whole": (lambda: ats.unpack_padded(_X, [0, 4], 4.5), ats.ArgumentError, "length: expected a whole number"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_helpers(name: str) -> None:
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        call()


# ---------------------------------------------------------------- jagged tensors


def jagged(sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor([x.detach() for x in sequences], **JAGGED)


@pytest.mark.parametrize("mask", [None, ats.Causal(), ats.Causal() & ats.SlidingWindow(left=2)], ids=str)
@pytest.mark.parametrize("layout", ["length first", "heads first", "no heads"])
def test_jagged_tensors(layout: str, mask: Any) -> None:
    """In and out, with the same offsets: a residual can be added, and gradients are jagged too."""
    sequences = draw([3, 0, 5], *(() if layout == "no heads" else (2,)), 4)
    x = jagged(sequences)
    given = x.transpose(1, 2) if layout == "heads first" else x
    options: dict[str, Any] = {"mask": mask, "head_axis": -2 if layout == "length first" else -3}
    out = ats.attend(given, given, given, **options)
    assert out.shape == given.shape and out.offsets() is x.offsets()
    (out + given).values().pow(2).sum().backward()
    own = [y.transpose(0, 1) if layout == "heads first" else y for y in sequences]
    alone = [ats.attend(y[None], y[None], y[None], **options)[0] for y in own]
    sum(((a + y) ** 2).sum() for a, y in zip(alone, own, strict=True)).backward()
    for found, wanted in zip(out.unbind(), alone, strict=True):
        close(found.detach(), wanted.detach())
    for found, y in zip(x.grad.unbind(), sequences, strict=True):
        close(found, y.grad)


def test_jagged_tensors_of_other_lengths() -> None:
    """Grouped heads, a score with heads, other lengths of keys, and statistics, which are jagged as the queries are."""
    queries, keys = draw([3, 1, 5], 4, 6), draw([2, 4, 7], 2, 6)
    query, key = jagged(queries), jagged(keys)
    score, causal = ats.ScaledDot(torch.linspace(0.1, 1, 4, dtype=torch.float64)), ats.Causal("bottom_right")
    out, stats = ats.attend(query, key, key, score=score, mask=causal, head_axis=-2, return_stats=("entropy",))
    assert stats.log_sum_exp is None
    for q, k, found, entropy in zip(queries, keys, out.unbind(), stats.entropy.unbind(), strict=True):
        wanted, alone = ats.attend(
            q[None], k[None], k[None], score=score, mask=causal, head_axis=-2, return_stats=("entropy",)
        )
        close(found.detach(), wanted[0].detach())
        close(entropy.detach(), alone.entropy[0].detach())


def test_jagged_keys_with_offsets_of_their_own() -> None:
    query, key = jagged(draw([3, 2], 2, 4)), jagged(draw([3, 2], 2, 4))
    wanted = ats.attend(query, query, query, head_axis=-2, mask=ats.Causal())
    same = torch.nested.nested_tensor_from_jagged(query.values(), key.offsets().clone())
    close(ats.attend(query, same, query, head_axis=-2, mask=ats.Causal()).values().detach(), wanted.values().detach())
    with pytest.raises(
        ats.ShapeError,
        match=r"value: expected sequences of the lengths of key, .*Hint: torch\.nested\.nested_tensor_from_jagged",
    ):
        ats.attend(query, key, jagged(draw([2, 3], 2, 4)), head_axis=-2)


def _holes() -> torch.Tensor:
    return torch.nested.narrow(torch.ones(2, 8, 2, 4), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), torch.jagged)


JAGGED_ERRORS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "the axis of heads": (lambda x: ats.attend(x, x, x), ats.ShapeError, "query: .* on axis -2, .* got on axis -3"),
    "dense keys": (
        lambda x: ats.attend(x, x.values()[None], x, head_axis=-2),
        ats.FrameworkError,
        "key: expected a jagged tensor, as query is",
    ),
    "a dense query": (
        lambda x: ats.attend(x.values()[None], x, x, head_axis=-2),
        ats.FrameworkError,
        "key: expected a dense array, got a nested tensor",
    ),
    "holes": (
        lambda x: ats.attend(_holes(), _holes(), _holes(), head_axis=-2),
        ats.FrameworkError,
        "query: .* a jagged tensor with holes .*contiguous",
    ),
    "valid_lens": (
        lambda x: ats.attend(x, x, x, head_axis=-2, valid_lens=[1, 1]),
        ats.ArgumentError,
        "valid_lens: expected nothing, as query is a jagged tensor",
    ),
    "weights": (lambda x: ats.attend(x, x, x, head_axis=-2, return_weights=True), ats.ArgumentError, "return_weights"),
    "bias": (lambda x: ats.attend(x, x, x, head_axis=-2, bias=torch.ones(())), ats.ArgumentError, "bias"),
    "other masks": (
        lambda x: ats.attend(x, x, x, head_axis=-2, mask=~ats.Causal()),
        ats.MaskError,
        r"mask: expected Causal or SlidingWindow .* got ~Causal\(\).* Hint: .*Packed",
    ),
    "a strided nested tensor": (
        lambda x: ats.attend(*[torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])] * 3),
        ats.FrameworkError,
        "query: expected a dense array, got a nested tensor",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("name", JAGGED_ERRORS)
def test_errors_of_jagged_tensors(name: str) -> None:
    call, error, text = JAGGED_ERRORS[name]
    with pytest.raises(error, match=text):
        call(jagged(draw([3, 2], 2, 4)))


# ---------------------------------------------------------------- work


def test_tiles_between_sequences_are_skipped() -> None:
    """Only pairs within the sequences are computed, up to the rows of a micro-tile and a tile of keys."""
    lengths = [256] * 8
    x = np.ones((1, sum(lengths), 4), np.float32)
    text = str(ats.explain(x, x, x, mask=ats.Packed(cumulative(lengths))))
    assert "skip 8" in text, text
    for first, second in itertools.pairwise(cumulative(lengths)):
        assert ats.Packed(cumulative(lengths)).intervals(2048, 2048)[1][0, first:second].tolist() == [second] * 256
