"""Attention over 1 to 8 devices of one process: the numbers of one device, and rows sent as explained.

`test_parallel_jax.py` runs this file in a process of its own, which has 8 devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnscore as ats
import covering
from attnscore.parallel import Shard
from attnscore.parallel.jax import attend, explain, gather_rows, join_rows, merge_over, split_rows
from cases import MASK, MASKS, SCORE, SCORES, SOME_SCORES, Sizes
from covering import pairs
from harness import Call, make_call
from parallel_torch_calls import shards_of

DEVICES = (1, 2, 3, 4, 8)
MODES = ("gather", "ring", "heads")
ROWS = jax.P(None, None, "context")
PLACEMENTS = {
    "whole": ("contiguous", "contiguous"),
    "tails": ("head_tail", "head_tail"),
    "balanced": ("balanced", "contiguous"),
    "uneven": ("uneven", "uneven"),
}
EXTRAS = ("", "bias", "bias-sink", "sink", "hiding-bias", "key-bias", "row-bias")
# With an axis of positions in a parameter, which is none of the sequence's here.
POSITIONS = ("rows", "keys", "heads-rows", "batch-heads")
SHARED_SCORES = [score.name for score in SCORES if score.name.removeprefix("scaled_dot-") not in POSITIONS]
SOME_MASKS = (
    *("none", "Causal", "SlidingWindow-both", "valid_lens-2d", "array-4d", "Neighbours-and", "MaskFunction-heads"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class PerHead:
    """A score of the user's own with a parameter for each head."""

    rate: Any

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        rate = ops.reshape(self.rate, (query.shape[-4], query.shape[-3], 1, 1))
        return rate * ops.matmul(query, ops.matrix_transpose(key))


HEADS_MASK = ats.Dense(np.ones((1, 4, 24, 24), bool))


def mesh_of(devices: int) -> Any:
    kind = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("context",), axis_types=kind, devices=jax.devices()[:devices])


def over(devices: int, function: Callable[..., Any], *arrays: Any, out: Any = ROWS, rows: Any = ROWS) -> Any:
    """A function of arrays that are divided by rows."""
    divided = jax.shard_map(function, mesh=mesh_of(devices), in_specs=(rows,) * len(arrays), out_specs=out)
    return jax.jit(divided)(*arrays)


def results(call: Call, score: str, mask: str, devices: int, placement: tuple[str, str], options: Any) -> Any:
    """Outputs and gradients of a call of the tables, inside one program over the devices."""
    sizes = Sizes(queries=call.visible.shape[-2], keys=call.visible.shape[-1])
    arguments = MASK[mask].arguments(sizes)
    queries = shards_of(placement[0], sizes.queries, devices, arguments.get("mask"), sizes.keys)
    keys = shards_of(placement[1], sizes.keys, devices)
    held = {"query": queries, "key": keys, "value": keys}
    if call.bias is not None and call.bias.shape[-2] > 1:
        held["bias"] = queries
    leaves = {name: jnp.asarray(x) for name, x in call.leaves.items()}
    seeds = [jnp.asarray(seed) for seed in call.seeds_outward().values()]

    def local(leaves: Any) -> Any:
        own = {name.removeprefix("score."): x for name, x in leaves.items() if name.startswith("score.")}
        extras = {name: leaves[name] for name in ("bias", "sink") if name in leaves}
        masks = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
        arrays = (leaves[name] for name in ("query", "key", "value"))
        out, stats = attend(
            *arrays, axis_name="context", queries=queries, keys=keys, score=SCORE[score].make(**own),
            return_stats=True, **masks, **extras, **options,
        )  # fmt: skip
        return {"out": out, **{name: x for name, x in stats._asdict().items() if x is not None}}

    def outputs_of(leaves: Any) -> Any:
        placed = {name: split_rows(x, held[name]) if name in held else x for name, x in leaves.items()}
        # Rows are on the second last axis of arrays that have them, whatever their number of axes.
        specs = {
            name: jax.P(*(None,) * (x.ndim - 2), "context") if name in held else jax.P() for name, x in placed.items()
        }
        found = jax.shard_map(local, mesh=mesh_of(devices), in_specs=(specs,), out_specs=ROWS)(placed)
        found = {name: join_rows(x, queries, -2 if name == "out" else -1) for name, x in found.items()}
        return [found[name] for name in call.seeds], found

    @jax.jit
    def both(leaves: Any) -> Any:
        _, vjp, outputs = jax.vjp(outputs_of, leaves, has_aux=True)
        return outputs, vjp(seeds)[0]

    outputs, grads = both(leaves)
    return {name: np.asarray(x) for name, x in outputs.items()} | {
        f"grad.{name}": np.asarray(grad) for name, grad in grads.items()
    }


def check(score: str, mask: str, extras: str, dtype: str, devices: int, placement: Any, mode: str) -> None:
    call = make_call(score, mask, dtype, extras)
    try:
        found = results(call, score, mask, devices, placement, {"mode": mode})
    except ats.ArgumentError as error:
        # Heads that the devices do not divide, or with masks and parameters of their own.
        assert mode == "heads" and "mode: expected one that" in str(error)
        found = results(call, score, mask, devices, placement, {"mode": "gather"})
    call.check(found)


@pytest.mark.parametrize(
    ("score", "mask", "extras", "dtype", "devices", "placement", "mode"),
    [
        ("additive-tanh-bias", "SlidingWindow-both", "bias", "float64", 4, "tails", "gather"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                ("scaled_dot", "Causal", "", "float32", 8, "whole", "auto"),
                ("gaussian-heads", "valid_lens", "bias-sink", "float64", 3, "uneven", "ring"),
                ("temperature-learned-dot", "none", "row-bias", "bfloat16", 2, "balanced", "heads"),
                ("cosine-heads-zero-vectors", "Documents", "sink", "bfloat16", 4, "tails", "ring"),
                ("combination-mixed", "SlidingWindow-both", "", "float64", 2, "tails", "ring"),
            ]
        ),
    ],
)
def test_some_calls(score: str, mask: str, extras: str, dtype: str, devices: int, placement: str, mode: str) -> None:
    check(score, mask, extras, dtype, devices, PLACEMENTS[placement], mode)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["gaussian-heads", "bilinear-heads"])
def test_heads_take_parameters_of_each_head(score: str) -> None:
    call = make_call(score, "Causal", "float64", "bias-sink")
    call.check(results(call, score, "Causal", 2, PLACEMENTS["tails"], {"mode": "heads"}))


def thinned(every: int, **factors: Any) -> Any:
    """Some rows of a covering array, as each is a program to be compiled; with ``--products`` the product."""
    mark = pairs(**factors)
    step = 1 if covering.products else every
    return pytest.mark.parametrize(mark.args[0], mark.args[1][::step])


@pytest.mark.slow
@thinned(40, score=SHARED_SCORES, devices=DEVICES, placement=PLACEMENTS, extras=EXTRAS, mask=SOME_MASKS,
         dtype=("float64", "float32"), mode=MODES)  # fmt: skip
def test_every_score(score: str, mask: str, extras: str, devices: int, placement: Any, dtype: str, mode: str) -> None:
    check(score, mask, extras, dtype, devices, placement, mode)


@pytest.mark.slow
@thinned(66, mask=[mask.name for mask in MASKS], score=[score.name for score in SOME_SCORES], devices=DEVICES,
         placement=PLACEMENTS, extras=EXTRAS, dtype=("float64", "float32"), mode=MODES)  # fmt: skip
def test_every_mask(mask: str, score: str, devices: int, placement: Any, extras: str, dtype: str, mode: str) -> None:
    check(score, mask, extras, dtype, devices, placement, mode)


NORMALIZERS = {"sigmoid": "sigmoid", "sparsemax": "sparsemax", "entmax15": "entmax15", "entmax": ats.Entmax(1.2)}


def test_sparsemax_of_two_devices() -> None:
    check_normalizer("sparsemax", "scaled_dot", "Causal", 2, PLACEMENTS["tails"], "gather")


@pytest.mark.slow
@thinned(3, normalizer=NORMALIZERS, mode=("auto", "gather", "heads"), mask=("Causal", "array-4d"),
         score=("scaled_dot", "additive-tanh-bias", "own-tile_gradient"), devices=(1, 2, 4),
         placement=PLACEMENTS)  # fmt: skip
def test_normalizers_are_those_of_one_device(
    normalizer: Any, mode: str, mask: str, score: str, devices: int, placement: Any
) -> None:
    if mode == "heads":
        devices, mask = min(devices, 2), mask.replace("array-4d", "none")  # of 2 KV heads, which have one mask
    check_normalizer(normalizer, score, mask, devices, placement, mode)


def check_normalizer(normalizer: Any, score: str, mask: str, devices: int, placement: Any, mode: str) -> None:
    """Output, gradients and statistics equal a call on one device."""
    call = make_call(score, mask, "float64", "bias")
    # Log-sum-exp and entropy belong to the softmax.
    call = dataclasses.replace(call, seeds={"out": call.seeds["out"]})
    found = results(call, score, mask, devices, placement, {"mode": mode, "normalizer": normalizer})
    wanted = call.jax(jit=True, normalizer=normalizer)
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=1e-10, atol=1e-12, err_msg=name)


# ------------------------------------------------------------------ dropout, lengths, bytes


def arrays(length: int = 24, heads: int = 4, kv_heads: int = 4) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = (2, heads, length, 6), (2, kv_heads, length, 6), (2, kv_heads, length, 3)
    return tuple(jnp.asarray(rng.standard_normal(shape)) for shape in shapes)


def compare(devices: int, given: tuple[jax.Array, ...], shards: Any, **options: Any) -> None:
    """Output and gradients equal a call on one device; `options` with "mode" go to the devices."""
    mode = options.pop("mode", "auto")

    def divided(*given: Any) -> Any:
        def local(*own: Any) -> Any:
            return attend(*own, axis_name="context", queries=shards, mode=mode, **options)

        placed = given if shards is None else tuple(split_rows(x, shards) for x in given)
        found = over(devices, local, *placed)
        return found if shards is None else join_rows(found, shards)

    agree(divided, lambda *x: ats.attend(*x, **options), given)


def agree(divided: Any, whole: Any, given: tuple[jax.Array, ...]) -> None:
    """Output and gradients of two functions."""
    found, wanted = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)))(*given) for f in (divided, whole)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_dropout_has_the_bits_of_one_device(mode: str) -> None:
    shards = [Shard.head_tail(26, rank, 4) for rank in range(4)]
    compare(4, arrays(26), shards, mode=mode, mask=ats.Causal(), dropout=0.4, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_traced_lengths_and_seeds(mode: str) -> None:
    shards = [Shard.contiguous(26, rank, 4) for rank in range(4)]
    given = tuple(split_rows(x, shards) for x in arrays(26))
    lens, seed = jnp.asarray([26, 9]), jax.random.key(5)

    def options(lens: Any, seed: Any) -> dict[str, Any]:
        return {"valid_lens": lens, "mask": ats.Causal(), "dropout": 0.4, "seed": seed}

    def local(*own: Any) -> Any:
        return attend(*own[:3], axis_name="context", queries=shards, mode=mode, **options(*own[3:]))

    def divided(*given: Any) -> Any:
        specs = (ROWS, ROWS, ROWS, jax.P(), jax.P())
        found = jax.shard_map(local, mesh=mesh_of(4), in_specs=specs, out_specs=ROWS)(*given, lens, seed)
        return join_rows(found, shards)

    def whole(*given: Any) -> Any:
        return ats.attend(*(join_rows(x, shards) for x in given), **options(lens, seed))

    agree(divided, whole, given)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_devices_with_nothing_to_do(mode: str) -> None:
    shards = [Shard.contiguous(5, rank, 8) for rank in range(8)]
    compare(8, arrays(5, 8, 8), shards, mode=mode, mask=ats.Causal())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "rows", "mask"),
    [("context", jax.P("x", None, "context"), ats.SlidingWindow(5, 0)),
     (("x", "context"), jax.P(None, None, ("x", "context")), ats.Causal())],
    ids=["batch entries and rows", "rows over both"],
)  # fmt: skip
def test_a_mesh_of_two_axes(axes: Any, rows: Any, mask: Any) -> None:
    """Without `jit`."""
    given, kind = arrays(24), (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("x", "context"), axis_types=kind)

    def local(*own: Any) -> Any:
        return attend(*own, axis_name=axes, mask=mask)

    found = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)(*given)
    np.testing.assert_allclose(found, ats.attend(*given, mask=mask), atol=1e-12)


@pytest.mark.parametrize(
    "transform", ["none", *(pytest.param(x, marks=pytest.mark.slow) for x in ("grad", "vmap of grad"))]
)
def test_one_device_inside_an_eager_shard_map(transform: str) -> None:
    """The library's plain call, with derivatives inside of the function that is divided."""
    given = [x[0] for x in arrays(8)]

    def loss(*own: Any) -> Any:
        return (ats.attend(*own) ** 2).sum()

    function = jax.grad(loss) if "grad" in transform else ats.attend
    local = jax.vmap(function) if "vmap" in transform else function
    rows = jax.P("context")
    found = jax.shard_map(local, mesh=mesh_of(2), in_specs=rows, out_specs=rows)(*given)
    np.testing.assert_allclose(found, local(*given), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=["explicit", "auto"])
def test_arrays_that_are_on_the_devices(kind: Any) -> None:
    """On a mesh whose axes are part of the types too, where indices of divided rows are refused."""
    x, shards = arrays(26)[0], [Shard.head_tail(26, rank, 4) for rank in range(4)]
    mesh = jax.make_mesh((4,), ("context",), axis_types=(kind,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=ROWS, out_specs=ROWS)
        def call(x: Any) -> Any:
            return attend(x, x, x, axis_name="context", queries=shards, mask=ats.Causal())

        own = jax.device_put(split_rows(x, shards), jax.NamedSharding(mesh, ROWS))
        found = join_rows(call(own), shards)
        grad = join_rows(jax.grad(lambda own: (call(own) ** 2).sum())(own), shards)
    np.testing.assert_allclose(found, ats.attend(x, x, x, mask=ats.Causal()), atol=1e-12)
    wanted = jax.grad(lambda x: (ats.attend(x, x, x, mask=ats.Causal()) ** 2).sum())(x)
    np.testing.assert_allclose(grad, wanted, atol=1e-12)


@pytest.mark.parametrize(
    ("mask", "mode"),
    [
        (ats.SlidingWindow(5, 0), "gather"),
        pytest.param(ats.Causal(), "gather", marks=pytest.mark.slow),
        pytest.param(None, "ring", marks=pytest.mark.slow),
    ],
)
def test_bytes_are_those_explained(mask: Any, mode: str) -> None:
    """Counted at the collectives of the program: each sender of a `ppermute` sends the operand."""
    explained: list[Any] = []

    def local(*own: Any) -> Any:
        explained.append(explain(*own, axis_name="context", mask=mask, mode=mode))
        return attend(*own, axis_name="context", mask=mask, mode=mode)

    program = jax.make_jaxpr(lambda *x: over(4, local, *x))(*arrays(32))
    assert collective_bytes(program.jaxpr, 4) == list(explained[0].forward_bytes)


def test_a_window_sends_as_much_for_any_length() -> None:
    def bytes_of(length: int) -> list[int]:
        def local(*own: Any) -> Any:
            return attend(*own, axis_name="context", mask=ats.SlidingWindow(5, 0))

        return collective_bytes(jax.make_jaxpr(lambda *x: over(4, local, *x))(*arrays(length)).jaxpr, 4)

    assert bytes_of(32) == bytes_of(320) == [5 * 2 * 4 * 9 * 8] * 3 + [0]


def collective_bytes(jaxpr: Any, devices: int) -> list[int]:
    """Bytes that each device sends in all collectives of a program; they have to be `ppermute`."""
    sent = [0] * devices
    for equation in jaxpr.eqns:
        assert "all_" not in equation.primitive.name
        if equation.primitive.name == "ppermute":
            size = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
            for source, _ in equation.params["perm"]:
                sent[source] += size
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                sent = [a + b for a, b in zip(sent, collective_bytes(inner, devices), strict=True)]
    return sent


@pytest.mark.slow
def test_programs_call_the_native_kernel() -> None:
    if not ats.available()["kernels"]["native"]:
        pytest.skip("the native kernel is not built")
    given = arrays(32)

    def loss(*given: Any) -> Any:
        def local(*own: Any) -> Any:
            return attend(*own, axis_name="context", mask=ats.Causal())

        return over(4, local, *given).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).as_text()
    assert "attnscore_forward" in text
    assert "attnscore_backward" in text


# ------------------------------------------------------------------ rows, decoding, errors


def test_rows_are_gathered_and_split() -> None:
    shards = [Shard.head_tail(13, rank, 4) for rank in range(4)]
    x = arrays(13)[0]
    placed = split_rows(x, shards)
    np.testing.assert_array_equal(join_rows(placed, shards), x)
    found = over(4, lambda own: gather_rows(own, shards, "context"), placed, out=jax.P("context"))
    np.testing.assert_array_equal(found, jnp.concatenate([x] * 4))


@pytest.mark.slow
def test_decoding_merges_the_keys_of_all_devices() -> None:
    _, key, value = arrays(24)
    query = arrays(3)[0]

    def local(key: Any, value: Any) -> Any:
        valid = jnp.clip(17 - 6 * jax.lax.axis_index("context"), 0, 6)
        out, stats = ats.attend(query, key, value, valid_lens=jnp.full(2, valid), return_stats=("log_sum_exp",))
        return merge_over(out, stats.log_sum_exp, "context")

    out, total = over(4, local, key, value, out=jax.P())
    wanted, stats = ats.attend(query, key, value, valid_lens=jnp.asarray([17, 17]), return_stats=("log_sum_exp",))
    np.testing.assert_allclose(out, wanted, atol=1e-12)
    np.testing.assert_allclose(total, stats.log_sum_exp, atol=1e-12)
    nothing = over(4, lambda x: merge_over(x, x[..., 0] - jnp.inf, "context"), value, out=jax.P())
    assert not np.asarray(nothing[0]).any()
    assert np.isneginf(nothing[1]).all()


SHARDS = [Shard.contiguous(24, rank, 4) for rank in range(4)]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mode": "fast"}, ats.ArgumentError, "mode: expected"),
        ({"queries": SHARDS[:3]}, ats.ArgumentError, "queries: expected one shard for each of 4 devices, got 3"),
        ({"queries": [Shard.whole(24)] * 4}, ats.ShapeError, "queries: expected at most 6 positions a device"),
        ({"queries": [SHARDS[0]] * 4}, ats.ArgumentError, "queries: expected shards that hold each position once"),
        ({"keys": 5}, ats.ArgumentError, "keys: expected a Shard of each rank, got 5"),
        ({"memory": "1GB"}, ats.ArgumentError, "memory: expected a whole number, 0 or more, got '1GB'"),
        ({"mask": ats.Dense(jnp.ones((6, 24), bool))}, ats.MaskError, "mask: expected"),
        ({"bias": jnp.ones((7, 24))}, ats.ShapeError, "bias: expected a shape that broadcasts"),
        ({"kernel": "dense"}, ats.KernelUnavailable, "kernel: expected one that takes lowered keys, got 'dense'"),
        ({"mode": "heads", "heads": 2}, ats.ArgumentError, "mode: .*4 ranks do not divide 2 heads and 2 KV heads"),
        ({"mode": "ring", "normalizer": "sigmoid"}, ats.ArgumentError, "'ring': a normalizer other than the softmax"),
        ({"mode": "heads", "score": PerHead(jnp.arange(4.0))}, ats.ArgumentError, "parameters of its own"),
        ({"mode": "heads", "mask": HEADS_MASK}, ats.ArgumentError, "each head has a mask of its own"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    heads = options.pop("heads", 4)
    with pytest.raises(error, match=words):
        over(4, lambda *own: attend(*own, axis_name="context", **options), *arrays(24, heads, heads))


def test_queries_are_not_passed() -> None:
    with pytest.raises(ats.ArgumentError, match="gradient: expected 'reduce' in JAX"):
        over(4, lambda *own: explain(*own, axis_name="context", gradient="queries") and own[0], *arrays())
