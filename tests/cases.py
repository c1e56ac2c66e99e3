"""The table of cases that drives every generic test.

One row is one score, one mask, one kernel, one framework or one dtype; a new one adds its row here and is then held
to the oracle in every test. A score's row says its formula in the words of ``oracle``; a mask's row says when query i
sees key j in plain Python, as the documentation does: neither knows the library's own computation.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import attnscore as ats
import covering
import oracle
from oracle import ACTIVATIONS
from own_scores import OwnAbsolute, OwnPlain, OwnSquare


@dataclass(frozen=True)
class Mode:
    """One way to call one framework, and how much of the tables it runs; outputs and gradients in each."""

    framework: str
    name: str
    run: Callable[[Any], dict[str, Any]] | None
    """What a ``harness.Call`` gives in this mode; None where another environment runs it."""
    whole: bool = False
    """Runs every row of every table, in the tests of scores, masks, shapes and so on."""
    every: int = 1
    """Of the rows of `families`, every so many, of which each second one is slow; with ``--products`` all."""
    own: str = ""
    """The file of the framework's own tests."""


def _graph(function: Any) -> Any:
    import tensorflow as tf  # costs seconds

    return tf.function(function)


# A row of the tables costs milliseconds in NumPy and PyTorch, tens of them in eager TensorFlow, and seconds where each
# shape of each operation or graph is compiled: those run one of each family here, and what is theirs in their own file
# (TensorFlow there: each score under one mask and each mask under one score, `in_turn`).
MODES = (
    Mode("numpy", "eager", lambda call: call.numpy(), whole=True),
    Mode("torch", "eager", lambda call: call.torch(), whole=True, own="test_torch_operators.py"),
    Mode("tensorflow", "eager", lambda call: call.tensorflow(), own="test_tensorflow.py"),
    Mode("tensorflow", "graph", lambda call: call.tensorflow(_graph), every=5, own="test_tensorflow.py"),
    Mode("jax", "eager", lambda call: call.jax(), every=5, own="test_jax.py"),
    Mode("jax", "jit", lambda call: call.jax(jit=True), every=4, own="test_jax.py"),
    Mode("jax", "vmap", lambda call: call.jax(vmap=True), every=7, own="test_jax.py"),
    Mode("mxnet", "eager", None, own="test_mxnet.py"),  # needs NumPy below 1.24, and so an environment of its own
)
FRAMEWORKS = tuple(mode.framework for mode in MODES if mode.whole)
"""Those that run every row of every table."""
KERNELS = ("gather", "native", "fused", "triton", "streaming", "dense")
SMALL_CALLS = ("one_tile", "few_keys")  # of compiled programs alone: test_one_tile.py, test_few_keys.py
AUTOMATIC = "streaming" if os.environ.get("ATTNSCORE_NO_NATIVE") == "1" else "native"
"""The kernel that runs when nothing is said against it: native, unless the environment says that it is not meant."""
needs_native = pytest.mark.skipif(AUTOMATIC != "native", reason="turned off by ATTNSCORE_NO_NATIVE=1")
"""Of a test of the native kernels. Where they are missing, and are not turned off, it fails."""
NOT_NATIVE = ("computed in Python", "scale per head of distances")
"""Reasons for which the native kernel leaves a row of the tables to another."""
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Sizes:
    """Axes of one call. Without heads, `heads` is 1."""

    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    queries: int = 7
    keys: int = 12
    dim: int = 5
    key_dim: int = 5
    value_dim: int = 3


# ---------------------------------------------------------------- scores


Arrays = dict[str, tuple[int | str, ...]]


@dataclass(frozen=True)
class Score:
    """One row: how the score is made from its arrays, its formula, and the shapes of the arrays."""

    name: str
    make: Callable[..., Any]
    formula: Callable[..., Any]
    arrays: Arrays = dataclasses.field(default_factory=dict)
    """Axes by name: H (query heads), h, d, dk, n, m, B, or a number."""
    dims: tuple[int, int] = (5, 5)
    hidden: int = 3
    magnitude: str = "product"
    """What the rounding error of a score is relative to: the absolute terms of a product, w_v, or the score itself."""
    terms: Callable[..., Any] | None = None
    """The formula inside a cap, whose terms a product's error is relative to."""
    prepare: Callable[[np.ndarray, np.ndarray], None] | None = None
    smooth: bool = True
    """Twice differentiable near random inputs: not at the zero vector of a cosine, which `prepare` puts there."""

    def sized(self, sizes: Sizes) -> Sizes:
        return dataclasses.replace(sizes, dim=self.dims[0], key_dim=self.dims[1])

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        known = {
            "H": sizes.heads, "h": self.hidden, "d": self.dims[0], "dk": self.dims[1],
            "n": sizes.queries, "m": sizes.keys, "B": sizes.batch,
        }  # fmt: skip
        return {
            name: tuple(known[axis] if isinstance(axis, str) else axis for axis in axes)
            for name, axes in self.arrays.items()
        }


def _zero_vectors(query: np.ndarray, key: np.ndarray) -> None:
    query[..., 1::3, :] = 0
    key[..., ::4, :] = 0


def _far_away(query: np.ndarray, key: np.ndarray) -> None:
    query += 40
    key += 40


def _spread_out(query: np.ndarray, key: np.ndarray) -> None:
    query *= 6
    key *= 6


def _additive(activation: str, arrays: Arrays, dims: tuple[int, int], label: str = "") -> Score:
    return Score(
        f"additive-{activation}{label}",
        lambda **a: ats.Additive(activation=activation, **a),
        lambda q, k, **a: oracle.additive(q, k, **a, activation=ACTIVATIONS[activation]),
        arrays,
        dims,
        magnitude="additive",
    )


_PROJECTED: Arrays = {"w_v": ("h",), "W_q": ("h", "d"), "W_k": ("h", "dk")}
_ALL: Arrays = {**_PROJECTED, "bias": ("h",)}
_PER_HEAD: Arrays = {"w_v": ("H", "h"), "W_q": ("H", "h", "d"), "W_k": ("H", "h", "dk"), "bias": ("H", "h")}


def _capped(score: Any, cap: float) -> Any:
    return lambda **a: ats.SoftCap(score(**a), cap)


# fmt: off
SCORES = (
    Score("dot", ats.Dot, oracle.dot),
    Score("dot-by-name", lambda: "dot", oracle.dot),
    Score("scaled_dot", ats.ScaledDot, oracle.scaled_dot),
    Score("scaled_dot-by-name", lambda: "scaled_dot", oracle.scaled_dot),
    Score("scaled_dot-number", lambda: ats.ScaledDot(0.3), lambda q, k: oracle.scaled_dot(q, k, 0.3)),
    Score("scaled_dot-one", ats.ScaledDot, oracle.scaled_dot, {"scale": ()}),
    Score("scaled_dot-heads", ats.ScaledDot, oracle.scaled_dot, {"scale": ("H",)}),
    Score("scaled_dot-rows", ats.ScaledDot, oracle.scaled_dot, {"scale": ("n", 1)}),
    Score("scaled_dot-keys", ats.ScaledDot, oracle.scaled_dot, {"scale": (1, "m")}),
    Score("scaled_dot-heads-rows", ats.ScaledDot, oracle.scaled_dot, {"scale": ("H", "n", 1)}),
    Score("scaled_dot-batch", ats.ScaledDot, oracle.scaled_dot, {"scale": ("B", 1, 1, 1)}),
    Score("scaled_dot-batch-heads", ats.ScaledDot, oracle.scaled_dot, {"scale": ("B", "H", 1, "m")}),
    *(_additive(name, _PROJECTED, (4, 6)) for name in ACTIVATIONS),
    *(_additive(name, {"w_v": ("h",)}, (3, 3), "-projected") for name in ACTIVATIONS),
    *(_additive(name, _ALL, (4, 6), "-bias") for name in ACTIVATIONS),
    *(_additive(name, _PER_HEAD, (4, 6), "-heads") for name in ACTIVATIONS),
    _additive("tanh", {"w_v": ("h",), "W_q": ("h", "d")}, (4, 3), "-only-W_q"),
    _additive("tanh", {"w_v": ("h",), "W_k": ("h", "dk")}, (3, 4), "-only-W_k"),
    _additive("tanh", {"w_v": ("h",), "bias": ("h",)}, (3, 3), "-only-bias"),
    _additive("silu", {"w_v": ("H", "h"), "W_q": ("h", "d"), "W_k": ("H", "h", "dk")}, (4, 6), "-some-heads"),
    Score(
        "additive-leaky_relu-0.2",
        lambda **a: ats.Additive(activation="leaky_relu", negative_slope=0.2, **a),
        lambda q, k, **a: oracle.additive(q, k, **a, activation=lambda x: ACTIVATIONS["leaky_relu"](x, 0.2)),
        _PROJECTED, (4, 6), magnitude="additive",
    ),
    Score("bilinear", ats.Bilinear, oracle.bilinear, {"W": ("d", "dk")}, (4, 6)),
    Score("bilinear-heads", ats.Bilinear, oracle.bilinear, {"W": ("H", "d", "dk")}, (4, 6)),
    Score("gaussian", ats.Gaussian, oracle.gaussian, magnitude="distance"),
    Score("gaussian-by-name", lambda: "gaussian", oracle.gaussian, magnitude="distance"),
    Score("gaussian-number", lambda: ats.Gaussian(0.7), lambda q, k: oracle.gaussian(q, k, 0.7), magnitude="distance"),
    Score("gaussian-one", ats.Gaussian, oracle.gaussian, {"bandwidth": ()}, magnitude="distance"),
    Score("gaussian-heads", ats.Gaussian, oracle.gaussian, {"bandwidth": ("H",)}, magnitude="distance"),
    Score("gaussian-cancelling", ats.Gaussian, oracle.gaussian, magnitude="distance", prepare=_far_away),
    Score("gaussian-direct", lambda: ats.Gaussian(4.0), lambda q, k: oracle.gaussian(q, k, 4.0), magnitude="distance",
          prepare=_spread_out),
    Score("cosine", ats.Cosine, oracle.cosine, magnitude="cosine"),
    Score("cosine-by-name", lambda: "cosine", oracle.cosine, magnitude="cosine"),
    Score("cosine-number", lambda: ats.Cosine(3.0), lambda q, k: oracle.cosine(q, k, 3.0), magnitude="cosine"),
    Score("cosine-heads", ats.Cosine, oracle.cosine, {"scale": ("H",)}, magnitude="cosine"),
    Score("cosine-unit_keys", lambda: ats.Cosine(unit_keys=True), lambda q, k: oracle.scaled_dot(oracle.unit(q), k, 1)),
    Score("cosine-zero-vectors", ats.Cosine, oracle.cosine, magnitude="cosine", prepare=_zero_vectors,
          smooth=False),
    Score("cosine-heads-zero-vectors", ats.Cosine, oracle.cosine, {"scale": ("H",)},
          magnitude="cosine", prepare=_zero_vectors, smooth=False),
    Score("sum", ats.Sum, oracle.sums),
    Score("sum-by-name", lambda: "sum", oracle.sums),
    Score("soft_cap-dot", lambda: ats.SoftCap("scaled_dot", 1.5),
          lambda q, k: oracle.soft_cap(oracle.scaled_dot(q, k), 1.5), terms=oracle.scaled_dot),
    Score("soft_cap-gaussian", lambda bandwidth: ats.SoftCap(ats.Gaussian(bandwidth), 2.0),
          lambda q, k, bandwidth: oracle.soft_cap(oracle.gaussian(q, k, bandwidth), 2.0), {"bandwidth": ("H",)},
          magnitude="distance"),
    Score("soft_cap-additive", lambda **a: ats.SoftCap(ats.Additive(**a), 1.0),
          lambda q, k, **a: oracle.soft_cap(oracle.additive(q, k, **a), 1.0), _ALL, (4, 6), magnitude="additive"),
    Score("temperature-dot", lambda: ats.Temperature(ats.Dot(), 2.5), lambda q, k: oracle.dot(q, k) / 2.5),
    Score("temperature-sharp", lambda: ats.Temperature(ats.ScaledDot(), 0.2),
          lambda q, k: oracle.scaled_dot(q, k) / 0.2),
    Score("temperature-bilinear", lambda W: ats.Temperature(ats.Bilinear(W), 0.5),
          lambda q, k, W: oracle.bilinear(q, k, W) / 0.5, {"W": ("d", "dk")}, (4, 6)),
    Score("temperature-cosine", lambda scale: ats.Temperature(ats.Cosine(scale), 0.5),
          lambda q, k, scale: oracle.cosine(q, k, scale) / 0.5, {"scale": ("H",)}, magnitude="cosine"),
    Score("temperature-of-soft_cap-bilinear", lambda W: ats.Temperature(ats.SoftCap(ats.Bilinear(W), 2.0), 0.5),
          lambda q, k, W: oracle.soft_cap(oracle.bilinear(q, k, W), 2.0) / 0.5, {"W": ("H", "d", "dk")}, (4, 6),
          terms=lambda q, k, W: oracle.bilinear(q, k, W) / 0.5),
    Score("soft_cap-of-temperature-additive", lambda **a: ats.SoftCap(ats.Temperature(ats.Additive(**a), 0.5), 2.0),
          lambda q, k, **a: oracle.soft_cap(oracle.additive(q, k, **a) / 0.5, 2.0), _PER_HEAD, (4, 6),
          magnitude="additive"),
    Score("soft_cap-of-soft_cap-of-temperature-gaussian",
          lambda: ats.SoftCap(ats.SoftCap(ats.Temperature(ats.Gaussian(), 2.0), 3.0), 2.0),
          lambda q, k: oracle.soft_cap(oracle.soft_cap(oracle.gaussian(q, k) / 2.0, 3.0), 2.0), magnitude="distance"),
    Score("gaussian-dims", ats.Gaussian, oracle.gaussian_by_dim, {"bandwidth": (1, "d")}, magnitude="distance"),
    Score("gaussian-heads-dims", ats.Gaussian, oracle.gaussian_by_dim, {"bandwidth": ("H", "d")}, magnitude="distance"),
    Score("temperature-learned-dot", lambda temperature: ats.Temperature("dot", temperature),
          lambda q, k, temperature: oracle.dot(q, k) / oracle.per_head(temperature, 0), {"temperature": ("H",)}),
    Score("temperature-learned-gaussian",
          lambda temperature, bandwidth: ats.Temperature(ats.Gaussian(bandwidth), temperature),
          lambda q, k, temperature, bandwidth: oracle.gaussian(q, k, bandwidth) / oracle.per_head(temperature, 0),
          {"temperature": ("H",), "bandwidth": ()}, magnitude="distance"),
    Score("temperature-learned-additive", lambda temperature, **a: ats.Temperature(ats.Additive(**a), temperature),
          lambda q, k, temperature, **a: oracle.additive(q, k, **a) / temperature,
          {"temperature": (), **_ALL}, (4, 6), magnitude="additive"),
    Score("temperature-learned-heads-additive",
          lambda temperature, w_v: ats.Temperature(ats.Additive(w_v), temperature),
          lambda q, k, temperature, w_v: oracle.additive(q, k, w_v) / oracle.per_head(temperature, 0),
          {"temperature": ("H",), "w_v": ("h",)}, (3, 3), magnitude="additive"),
    Score("temperature-learned-of-soft_cap-bilinear",
          lambda temperature, W: ats.Temperature(ats.SoftCap(ats.Bilinear(W), 2.0), temperature),
          lambda q, k, temperature, W: oracle.soft_cap(oracle.bilinear(q, k, W), 2.0) / oracle.per_head(temperature, 0),
          {"temperature": ("H",), "W": ("d", "dk")}, (4, 6),
          terms=lambda q, k, temperature, W: oracle.bilinear(q, k, W) / oracle.per_head(temperature, 0)),
    Score("soft_cap-learned-dot", lambda cap: ats.SoftCap("scaled_dot", cap),
          lambda q, k, cap: oracle.soft_cap(oracle.scaled_dot(q, k), cap), {"cap": ()},
          terms=lambda q, k, cap: oracle.scaled_dot(q, k)),
    Score("soft_cap-learned-heads-additive", lambda cap, **a: ats.SoftCap(ats.Additive(**a), cap),
          lambda q, k, cap, **a: oracle.soft_cap(oracle.additive(q, k, **a), oracle.per_head(cap, 0)),
          {"cap": ("H",), **_PER_HEAD}, (4, 6), magnitude="additive"),
    Score("soft_cap-learned-of-temperature-learned-of-soft_cap-gaussian",
          lambda cap, temperature: ats.SoftCap(ats.Temperature(ats.SoftCap("gaussian", 3.0), temperature), cap),
          lambda q, k, cap, temperature: oracle.soft_cap(
              oracle.soft_cap(oracle.gaussian(q, k), 3.0) / oracle.per_head(temperature, 0), oracle.per_head(cap, 0)),
          {"cap": ("H",), "temperature": ("H",)}, magnitude="distance"),
    Score("temperature-learned-own-tile_gradient",
          lambda temperature, gain: ats.Temperature(OwnSquare(gain), temperature),
          lambda q, k, temperature, gain: oracle.square_dot(q, k, gain) / temperature,
          {"temperature": (), "gain": ()}, magnitude="own"),
    Score("combination-products", lambda **a: ats.ScaledDot() + 0.5 * ats.Bilinear(a["scores.1.W"]) + ats.Sum(),
          lambda q, k, **a: (
              oracle.scaled_dot(q, k) + 0.5 * oracle.bilinear(q, k, a["scores.1.W"]) + oracle.sums(q, k)),
          {"scores.1.W": ("d", "dk")}),
    Score("combination-learned-products",
          lambda **a: ats.Combination(("dot", ats.Cosine(a["scores.1.scale"])), (a["weights.0"], a["weights.1"])),
          lambda q, k, **a: (
              oracle.dot(q, k) * oracle.per_head(a["weights.0"], 0)
              + oracle.cosine(q, k, a["scores.1.scale"]) * a["weights.1"]),
          {"scores.1.scale": ("H",), "weights.0": ("H",), "weights.1": ()}),
    Score("combination-additive",
          lambda **a: 0.5 * ats.Additive(a["scores.0.w_v"]) + ats.Additive(a["scores.1.w_v"], a["scores.1.W_q"]),
          lambda q, k, **a: (
              0.5 * oracle.additive(q, k, a["scores.0.w_v"])
              + oracle.additive(q, k, a["scores.1.w_v"], a["scores.1.W_q"])),
          {"scores.0.w_v": (3,), "scores.1.w_v": ("H", 3), "scores.1.W_q": (3, "d")}, (3, 3), magnitude="additive"),
    Score("combination-mixed",
          lambda **a: ats.SoftCap(
              ats.Dot() * a["weights.0"] + ats.Gaussian(a["scores.1.bandwidth"]) + ats.SoftCap("scaled_dot", 1.5), 4.0),
          lambda q, k, **a: oracle.soft_cap(
              oracle.dot(q, k) * oracle.per_head(a["weights.0"], 0) + oracle.gaussian(q, k, a["scores.1.bandwidth"])
              + oracle.soft_cap(oracle.scaled_dot(q, k), 1.5), 4.0),
          {"weights.0": ("H",), "scores.1.bandwidth": ()}, magnitude="distance"),
    Score("own-tile", OwnAbsolute, oracle.distance_1, {"rate": ()}, magnitude="own"),
    Score("own-tile_gradient", OwnSquare, oracle.square_dot, {"gain": ()}, magnitude="own"),
    Score("own-no-dataclass", OwnPlain, lambda q, k: oracle.dot(q, k * k * k), magnitude="own"),
    Score("temperature-own-tile_gradient", lambda gain: ats.Temperature(OwnSquare(gain), 2.0),
          lambda q, k, gain: oracle.square_dot(q, k, gain) / 2.0, {"gain": ()}, magnitude="own"),
    Score("soft_cap-own-tile", lambda rate: ats.SoftCap(OwnAbsolute(rate), 2.0),
          lambda q, k, rate: oracle.soft_cap(oracle.distance_1(q, k, rate), 2.0), {"rate": ()}, magnitude="own",
          smooth=False),
)
# fmt: on
SCORE = {score.name: score for score in SCORES}

# One of each family, for tests whose subject is something else.
SOME_SCORES = tuple(
    SCORE[name]
    for name in ("scaled_dot", "scaled_dot-heads", "additive-tanh-bias", "additive-gelu-heads", "bilinear-heads",
                 "gaussian-direct", "gaussian-heads", "cosine-heads-zero-vectors", "sum", "soft_cap-gaussian",
                 "temperature-of-soft_cap-bilinear", "own-tile_gradient")
)  # fmt: skip

# One of each family that has arrays, and dtypes of (query, key and value; the arrays of the score, bias and sink).
SCORES_WITH_ARRAYS = ("scaled_dot-heads", "scaled_dot-keys", "cosine-heads", "gaussian-heads", "bilinear-heads",
                      "gaussian-dims", "temperature-learned-dot", "soft_cap-learned-heads-additive",
                      "additive-tanh-bias", "additive-gelu-heads", "soft_cap-gaussian",
                      "temperature-of-soft_cap-bilinear", "own-tile", "own-tile_gradient")  # fmt: skip
MIXED_DTYPES = (("float32", "float64"), ("float16", "float64"), ("bfloat16", "float32"), ("float32", "float16"),
                ("float64", "float32"))  # fmt: skip


# ----------------------------------------------------------------- masks


@dataclass(frozen=True)
class MaskCase:
    """One row: the arguments of a call, and who sees whom: ``sees(s, b, h, i, j)`` for sizes s, batch b, head h."""

    name: str
    arguments: Callable[[Sizes], dict[str, Any]]
    sees: Callable[[Sizes, int, int, int, int], bool]
    lengths: tuple[int, int] = (7, 12)
    intervals: bool = True
    """Whether the mask is one interval of keys per query."""

    def visible(self, s: Sizes) -> np.ndarray:
        found = np.zeros((s.batch, s.heads, s.queries, s.keys), bool)
        for index in np.ndindex(found.shape):
            found[index] = self.sees(s, *index)
        return found


def mask(name: str, make: Callable[[Sizes], Any], sees: Callable[..., bool], **rest: Any) -> MaskCase:
    return MaskCase(name, lambda s: {"mask": make(s)}, sees, **rest)


def _lens_2d(s: Sizes) -> np.ndarray:
    return np.array([[(3 * i + 5 * b) % (s.keys + 1) for i in range(s.queries)] for b in range(s.batch)])


def _is_edge(s: Sizes, i: int, j: int) -> bool:
    return any((3 * i + 5 * t) % s.keys == j for t in range(3 * i % 5 + (i == 6)))


def _neighbours(s: Sizes) -> ats.Neighbours:
    """Neighbours in no order; queries 0 and 5 have none."""
    rows = [[(3 * i + 5 * t) % s.keys for t in range(3 * i % 5 + (i == 6))] for i in range(s.queries)]
    return ats.Neighbours(np.cumsum([0, *map(len, rows)]), np.array([key for row in rows for key in row]))


def _scattered(s: Sizes) -> np.ndarray:
    return np.array([[(3 * j + b) % 5 > 1 for j in range(s.keys)] for b in range(s.batch)])


def _some_keys(s: Sizes) -> np.ndarray:
    return np.array([[j % 5 == b for j in range(s.keys)] for b in range(s.batch)])


def _left_padded(s: Sizes) -> np.ndarray:
    return np.array([[j >= 2 + 3 * b for j in range(s.keys)] for b in range(s.batch)])


def _blocks(length: int, s: Sizes) -> np.ndarray:
    """Contiguous documents, the last of which has id -1: padding."""
    return np.array([[min(j // (3 + b), 2) if j < length - 2 else -1 for j in range(length)] for b in range(s.batch)])


def _mixed(length: int, s: Sizes) -> np.ndarray:
    """Scattered documents, of which every seventh token is padding."""
    return np.array([[(5 * j + b) % 3 if j % 7 != 6 else -2 for j in range(length)] for b in range(s.batch)])


# Cumulative lengths of queries and of keys: sequences of 3 and 5, none and 2, 2 and none, 1 and 4.
_CU = ([0, 3, 3, 5, 6], [0, 5, 7, 7, 11])


def _packed(i: int, j: int, left: int = 99, right: int = 99, bottom_right: bool = False) -> bool:
    """Whether query i sees key j of the sequences `_CU`."""
    for first, last, start, stop in zip(_CU[0], _CU[0][1:], _CU[1], _CU[1][1:], strict=False):
        if first <= i < last and start <= j < stop:
            own = i - first + (stop - start) - (last - first) if bottom_right else i - first
            return own - left <= j - start <= own + right
    return False


# One comparison each: MXNet's arrays know no // and no & of booleans.
def _near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return abs(i + 2 - j) <= 3


def _shrinking(b: Any, h: Any, i: Any, j: Any, lens: Any) -> Any:
    return i + j < lens


def _dense(s: Sizes, *axes: int) -> np.ndarray:
    """An arbitrary array with a fully masked row and a key that no query attends to."""
    found = np.random.default_rng(7).random(axes) < 0.6
    found[..., min(2, axes[-2] - 1), :] = axes[-2] == 1
    found[..., min(5, axes[-1] - 1)] = False
    return found


# fmt: off
MASKS = (
    MaskCase("none", lambda s: {}, lambda s, b, h, i, j: True),
    MaskCase("valid_lens", lambda s: {"valid_lens": [s.keys - 3, 4]}, lambda s, b, h, i, j: j < (s.keys - 3, 4)[b]),
    MaskCase("valid_lens-empty", lambda s: {"valid_lens": [0, s.keys]}, lambda s, b, h, i, j: j < (0, s.keys)[b]),
    MaskCase("valid_lens-2d", lambda s: {"valid_lens": _lens_2d(s)}, lambda s, b, h, i, j: j < _lens_2d(s)[b, i]),
    MaskCase("valid_lens-float", lambda s: {"valid_lens": np.array([3.0, 5.0])}, lambda s, b, h, i, j: j < (3, 5)[b]),
    mask("ValidLens-number", lambda s: ats.ValidLens(5), lambda s, b, h, i, j: j < 5),
    mask("ValidLens-query_lens", lambda s: ats.ValidLens([7, 3], query_lens=[2, 5]),
         lambda s, b, h, i, j: j < (7, 3)[b] and i < (2, 5)[b]),
    mask("ValidLens-2d-query_lens", lambda s: ats.ValidLens(_lens_2d(s), query_lens=[6, 2]),
         lambda s, b, h, i, j: j < _lens_2d(s)[b, i] and i < (6, 2)[b]),
    mask("KeyRange", lambda s: ats.KeyRange([2, 0], [9, 4]), lambda s, b, h, i, j: (2, 0)[b] <= j < (9, 4)[b]),
    mask("KeyRange-numbers", lambda s: ats.KeyRange(3, [9, 4]), lambda s, b, h, i, j: 3 <= j < (9, 4)[b]),
    mask("KeyRange-empty", lambda s: ats.KeyRange([5, 0], [5, s.keys]), lambda s, b, h, i, j: b == 1),
    mask("KeyPadding-left", lambda s: ats.KeyPadding(_left_padded(s)), lambda s, b, h, i, j: j >= 2 + 3 * b),
    mask("KeyPadding-scattered", lambda s: ats.KeyPadding(_scattered(s)), lambda s, b, h, i, j: (3 * j + b) % 5 > 1,
         intervals=False),
    mask("KeyPadding-ones", lambda s: ats.KeyPadding(_left_padded(s).astype(np.int64)),
         lambda s, b, h, i, j: j >= 2 + 3 * b),
    mask("KeyPadding-shared", lambda s: ats.KeyPadding(_left_padded(s)[:1]), lambda s, b, h, i, j: j >= 2),
    mask("KeyPadding-nothing", lambda s: ats.KeyPadding(np.zeros((s.batch, s.keys), bool)),
         lambda s, b, h, i, j: False),
    mask("KeyPadding-from_ignore", lambda s: ats.KeyPadding.from_ignore(~_scattered(s)),
         lambda s, b, h, i, j: (3 * j + b) % 5 > 1, intervals=False),
    mask("Causal", lambda s: ats.Causal(), lambda s, b, h, i, j: j <= i, lengths=(9, 9)),
    mask("Causal-top_left", lambda s: ats.Causal("top_left"), lambda s, b, h, i, j: j <= i),
    mask("Causal-bottom_right", lambda s: ats.Causal("bottom_right"), lambda s, b, h, i, j: j <= i + 5),
    mask("Causal-top_left-tall", lambda s: ats.Causal("top_left"), lambda s, b, h, i, j: j <= i, lengths=(11, 6)),
    mask("Causal-bottom_right-tall", lambda s: ats.Causal("bottom_right"), lambda s, b, h, i, j: j <= i - 5,
         lengths=(11, 6)),
    mask("Causal-offset", lambda s: ats.Causal(offset=2), lambda s, b, h, i, j: j <= i + 2),
    mask("Causal-offset-batch", lambda s: ats.Causal(offset=[-3, 4]), lambda s, b, h, i, j: j <= i + (-3, 4)[b]),
    mask("SlidingWindow-left", lambda s: ats.SlidingWindow(left=2), lambda s, b, h, i, j: j >= i - 2, lengths=(9, 9)),
    mask("SlidingWindow-right", lambda s: ats.SlidingWindow(right=1, align="top_left"),
         lambda s, b, h, i, j: j <= i + 1),
    mask("SlidingWindow-both", lambda s: ats.SlidingWindow(2, 1, "bottom_right"),
         lambda s, b, h, i, j: i + 5 - 2 <= j <= i + 5 + 1),
    mask("SlidingWindow-self", lambda s: ats.SlidingWindow(0, 0), lambda s, b, h, i, j: i == j, lengths=(9, 9)),
    mask("SlidingWindow-unbounded", lambda s: ats.SlidingWindow(align="top_left"), lambda s, b, h, i, j: True),
    mask("SlidingWindow-offset", lambda s: ats.SlidingWindow(1, 2, offset=-3),
         lambda s, b, h, i, j: i - 3 - 1 <= j <= i - 3 + 2),
    mask("SlidingWindow-offset-batch", lambda s: ats.SlidingWindow(1, 1, offset=[3, -4]),
         lambda s, b, h, i, j: abs(j - i - (3, -4)[b]) <= 1),
    mask("SlidingWindow-tall", lambda s: ats.SlidingWindow(1, 1, "top_left"), lambda s, b, h, i, j: abs(j - i) <= 1,
         lengths=(11, 6)),
    mask("PrefixLM", lambda s: ats.PrefixLM([3, 6]), lambda s, b, h, i, j: j < (3, 6)[b] or j <= i),
    mask("PrefixLM-number", lambda s: ats.PrefixLM(0), lambda s, b, h, i, j: j <= i),
    mask("Documents", lambda s: ats.Documents(_blocks(9, s)),
         lambda s, b, h, i, j: _blocks(9, s)[b, i] == _blocks(9, s)[b, j] >= 0, lengths=(9, 9)),
    mask("Documents-two", lambda s: ats.Documents(_blocks(s.queries, s), _blocks(s.keys, s)),
         lambda s, b, h, i, j: _blocks(s.queries, s)[b, i] == _blocks(s.keys, s)[b, j] >= 0),
    mask("Documents-scattered", lambda s: ats.Documents(_mixed(s.queries, s), _mixed(s.keys, s)),
         lambda s, b, h, i, j: _mixed(s.queries, s)[b, i] == _mixed(s.keys, s)[b, j] >= 0, intervals=False),
    mask("Documents-shared", lambda s: ats.Documents(_mixed(9, s)[0]),
         lambda s, b, h, i, j: _mixed(9, s)[0, i] == _mixed(9, s)[0, j] >= 0, lengths=(9, 9), intervals=False),
    mask("Documents-strangers", lambda s: ats.Documents(np.full((1, s.queries), 3), _blocks(s.keys, s)),
         lambda s, b, h, i, j: False),
    mask("Packed", lambda s: ats.Packed([0, 4, 4, 7]), lambda s, b, h, i, j: i // 4 == j // 4 and max(i, j) < 7,
         lengths=(9, 9)),
    mask("Packed-one", lambda s: ats.Packed([0, s.queries], [0, s.keys]), lambda s, b, h, i, j: True),
    mask("Packed-none", lambda s: ats.Packed([0], [0]), lambda s, b, h, i, j: False),
    mask("Packed-two", lambda s: ats.Packed(*_CU), lambda s, b, h, i, j: _packed(i, j)),
    mask("Packed-top_left", lambda s: ats.Packed(*_CU).causal("top_left"),
         lambda s, b, h, i, j: _packed(i, j, right=0)),
    mask("Packed-bottom_right", lambda s: ats.Packed(*_CU).causal("bottom_right"),
         lambda s, b, h, i, j: _packed(i, j, right=0, bottom_right=True)),
    mask("Packed-window", lambda s: ats.Packed(*_CU).window(1, 2, "bottom_right"),
         lambda s, b, h, i, j: _packed(i, j, 1, 2, bottom_right=True)),
    mask("Packed-left", lambda s: ats.Packed(*_CU).window(left=1, align="top_left"),
         lambda s, b, h, i, j: _packed(i, j, left=1)),
    mask("Packed-and-Causal", lambda s: ats.Packed(np.array([0, 4, 4, 7])) & ats.Causal(),
         lambda s, b, h, i, j: i // 4 == j // 4 and j <= i < 7, lengths=(9, 9)),
    mask("Packed-or", lambda s: ats.Packed(*_CU).causal("bottom_right") | ats.KeyRange(11, 12),
         lambda s, b, h, i, j: _packed(i, j, right=0, bottom_right=True) or j == 11, intervals=False),
    mask("Neighbours", _neighbours, lambda s, b, h, i, j: _is_edge(s, i, j), intervals=False),
    mask("Neighbours-none", lambda s: ats.Neighbours([0] * (s.queries + 1), []), lambda s, b, h, i, j: False,
         intervals=False),
    mask("Neighbours-and", lambda s: _neighbours(s) & ats.Causal("bottom_right") & ats.ValidLens([11, 8]),
         lambda s, b, h, i, j: _is_edge(s, i, j) and j <= i + 5 and j < (11, 8)[b], intervals=False),
    mask("Neighbours-and-apart", lambda s: (ats.KeyRange(0, 3) | ats.KeyRange([7, 9], [9, 12])) & _neighbours(s),
         lambda s, b, h, i, j: _is_edge(s, i, j) and (j < 3 or (7, 9)[b] <= j < (9, 12)[b]), intervals=False),
    mask("Neighbours-or", lambda s: _neighbours(s) | ats.Causal("top_left"),
         lambda s, b, h, i, j: _is_edge(s, i, j) or j <= i, intervals=False),
    mask("Neighbours-not", lambda s: ~_neighbours(s), lambda s, b, h, i, j: not _is_edge(s, i, j), intervals=False),
    mask("array-2d", lambda s: _dense(s, s.queries, s.keys),
         lambda s, b, h, i, j: _dense(s, s.queries, s.keys)[i, j], intervals=False),
    mask("array-3d", lambda s: _dense(s, s.heads, s.queries, s.keys),
         lambda s, b, h, i, j: _dense(s, s.heads, s.queries, s.keys)[h, i, j], intervals=False),
    mask("array-4d", lambda s: _dense(s, s.batch, s.heads, s.queries, s.keys),
         lambda s, b, h, i, j: _dense(s, s.batch, s.heads, s.queries, s.keys)[b, h, i, j], intervals=False),
    mask("array-batch", lambda s: _dense(s, s.batch, 1, s.queries, s.keys),
         lambda s, b, h, i, j: _dense(s, s.batch, 1, s.queries, s.keys)[b, 0, i, j], intervals=False),
    mask("array-key", lambda s: _dense(s, s.batch, 1, 1, s.keys),
         lambda s, b, h, i, j: _dense(s, s.batch, 1, 1, s.keys)[b, 0, 0, j], intervals=False),
    mask("Dense-rows", lambda s: ats.Dense(_dense(s, s.heads, s.queries, 1)),
         lambda s, b, h, i, j: _dense(s, s.heads, s.queries, 1)[h, i, 0], intervals=False),
    mask("MaskFunction", lambda s: ats.MaskFunction(_near), lambda s, b, h, i, j: abs(i + 2 - j) <= 3),
    mask("MaskFunction-batch", lambda s: ats.MaskFunction(_shrinking, (np.array([5, 9]).reshape(2, 1, 1, 1),)),
         lambda s, b, h, i, j: i + j < (5, 9)[b]),
    mask("MaskFunction-scattered", lambda s: ats.MaskFunction(lambda b, h, i, j: (3 * j + i + b) % 5 > 1),
         lambda s, b, h, i, j: (3 * j + i + b) % 5 > 1, intervals=False),
    mask("MaskFunction-heads", lambda s: ats.MaskFunction(lambda b, h, i, j: j <= i + 2 * h, heads=s.heads),
         lambda s, b, h, i, j: j <= i + 2 * h, intervals=False),
    mask("MaskFunction-and", lambda s: ats.MaskFunction(_near) & ats.KeyPadding(_scattered(s)),
         lambda s, b, h, i, j: abs(i + 2 - j) <= 3 and (3 * j + b) % 5 > 1, intervals=False),
    mask("and", lambda s: ats.Causal("bottom_right") & ats.SlidingWindow(left=3, align="bottom_right"),
         lambda s, b, h, i, j: i + 5 - 3 <= j <= i + 5),
    mask("and-scattered", lambda s: ats.Causal("bottom_right") & ats.KeyPadding(_scattered(s)),
         lambda s, b, h, i, j: j <= i + 5 and (3 * j + b) % 5 > 1, intervals=False),
    mask("and-disjoint", lambda s: ats.KeyRange(0, 3) & ats.KeyRange(7, 9), lambda s, b, h, i, j: False),
    mask("or", lambda s: ats.Causal("top_left") | ats.ValidLens([4, 1]),
         lambda s, b, h, i, j: j <= i or j < (4, 1)[b]),
    mask("or-apart", lambda s: ats.KeyRange(0, 3) | ats.KeyRange([7, 9], [9, 12]),
         lambda s, b, h, i, j: j < 3 or (7, 9)[b] <= j < (9, 12)[b], intervals=False),
    mask("or-sinks",
         lambda s: ats.KeyRange(0, [1, 2]) & ats.Causal(offset=1) | ats.SlidingWindow(2, 0, offset=[4, 7]),
         lambda s, b, h, i, j: (j < (1, 2)[b] and j <= i + 1) or i + (2, 5)[b] <= j <= i + (4, 7)[b], intervals=False),
    mask("or-global", lambda s: ats.KeyPadding(_some_keys(s)) | ats.SlidingWindow(1, 1, "top_left"),
         lambda s, b, h, i, j: j % 5 == b or abs(i - j) <= 1, intervals=False),
    mask("or-array", lambda s: ats.Causal("top_left") | ats.Dense(_dense(s, s.batch, 1, s.queries, s.keys)),
         lambda s, b, h, i, j: j <= i or _dense(s, s.batch, 1, s.queries, s.keys)[b, 0, i, j], intervals=False),
    mask("not", lambda s: ~ats.Causal("top_left"), lambda s, b, h, i, j: j > i),
    mask("not-lens", lambda s: ~ats.ValidLens([12, 5]), lambda s, b, h, i, j: j >= (12, 5)[b]),
    mask("not-window", lambda s: ~ats.SlidingWindow(2, 1, offset=[2, 30]),
         lambda s, b, h, i, j: not i + (2, 30)[b] - 2 <= j <= i + (2, 30)[b] + 1, intervals=False),
    mask("and-arrays", lambda s: ats.Dense(_dense(s, s.batch, 1, s.queries, s.keys)) & ~ats.Dense(_dense(s, 1, s.keys))
         & ats.KeyPadding(_scattered(s)),
         lambda s, b, h, i, j: _dense(s, s.batch, 1, s.queries, s.keys)[b, 0, i, j] and not _dense(s, 1, s.keys)[0, j]
         and (3 * j + b) % 5 > 1, intervals=False),
    mask("and-documents", lambda s: ats.Documents(_mixed(s.queries, s), _mixed(s.keys, s))
         & ats.Documents(np.arange(s.queries) % 2, np.arange(s.keys) // 2 % 2 - (np.arange(s.keys) == 4)),
         lambda s, b, h, i, j: _mixed(s.queries, s)[b, i] == _mixed(s.keys, s)[b, j] >= 0
         and i % 2 == j // 2 % 2 - (j == 4), intervals=False),
    mask("not-and", lambda s: ~(ats.Documents(_mixed(s.queries, s), _mixed(s.keys, s)) & ats.Causal("bottom_right")),
         lambda s, b, h, i, j: not (_mixed(s.queries, s)[b, i] == _mixed(s.keys, s)[b, j] >= 0 and j <= i + 5),
         intervals=False),
    mask("nested", lambda s: (ats.Causal("bottom_right") & ats.ValidLens([6, 11])) | ~ats.KeyRange(1, [12, 8]),
         lambda s, b, h, i, j: (j <= i + 5 and j < (6, 11)[b]) or not 1 <= j < (12, 8)[b], intervals=False),
    mask("and-array", lambda s: ats.SlidingWindow(3, 3, "top_left") & ats.Dense(_dense(s, s.heads, s.queries, s.keys)),
         lambda s, b, h, i, j: abs(i - j) <= 3 and _dense(s, s.heads, s.queries, s.keys)[h, i, j], intervals=False),
    MaskCase("mask-and-valid_lens", lambda s: {"mask": ats.Causal("top_left"), "valid_lens": [5, 2]},
             lambda s, b, h, i, j: j <= i and j < (5, 2)[b]),
    MaskCase("array-and-valid_lens", lambda s: {"mask": _dense(s, s.queries, s.keys), "valid_lens": [9, 0]},
             lambda s, b, h, i, j: _dense(s, s.queries, s.keys)[i, j] and j < (9, 0)[b], intervals=False),
)
# fmt: on
MASK = {case.name: case for case in MASKS}
SOME_MASKS = tuple(
    MASK[name] for name in ("none", "valid_lens-2d", "Causal-bottom_right-tall", "Documents-scattered", "nested")
)


def families() -> list[tuple[str, str, str]]:
    """(score, mask, dtype): one of each family of scores and of masks, every dtype, a score without a gradient."""
    return [
        *((score.name, "Causal-bottom_right-tall", "float64") for score in SOME_SCORES),
        *(("additive-tanh-bias", mask.name, "float64") for mask in SOME_MASKS),
        *(("scaled_dot", "valid_lens-2d", dtype) for dtype in DTYPES),
        ("own-tile", "Causal-bottom_right-tall", "float64"),
    ]


def in_every_mode() -> list[Any]:
    """(mode, score, mask, dtype): the families in every mode that runs in this environment."""
    return [
        pytest.param(
            mode, *row, id="-".join((mode.framework, mode.name, *row)),
            marks=[pytest.mark.slow] if mode.every > 1 and (i + offset) // mode.every % 2 == 0 else [],
        )
        for offset, mode in enumerate(MODES)
        if mode.run is not None
        for i, row in enumerate(dict.fromkeys(families()))
        if covering.products or (i + offset) % mode.every == 0
    ]  # fmt: skip


def in_turn(dtypes: Sequence[str], extras: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """(score, mask, dtype, extras): every score under one mask, and every mask under one score; the rest in turn."""
    some = [score.name for score in SOME_SCORES]
    pairs = [(score.name, MASKS[(7 * i) % len(MASKS)].name) for i, score in enumerate(SCORES)]
    pairs += [(some[j % len(some)], mask.name) for j, mask in enumerate(MASKS)]
    return [
        (score, mask, dtypes[i % len(dtypes)], extras[(i // len(dtypes)) % len(extras)])
        for i, (score, mask) in enumerate(dict.fromkeys(pairs))
    ]
