"""Which kernel runs which problem: nothing falls from native to streaming unsaid.

A row that moves from one table to the other is a change that users feel: tens of times in speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnscore as ats
import native_cases  # noqa: F401 - without the module there is nothing to test here
from cases import DTYPES, MASKS, SCORES, Sizes
from covering import each
from harness import EXTRAS, build_call, tensor
from own_scores import OwnPlain

SIZES = Sizes(queries=9, keys=9)
CAUSAL = ats.Causal()
ARRAY = np.arange(81).reshape(9, 9) % 3 > 0

# What native leaves to another, of the tables that drive every generic test; all other rows are its own.
SCORES_LEFT = {
    "own-tile": "the score is computed in Python (TileForm)",
    "own-tile_gradient": "the score is computed in Python (TileForm)",
    "own-no-dataclass": "the score is computed in Python (TileForm)",
    "temperature-own-tile_gradient": "the score is computed in Python (TileForm)",
    "soft_cap-own-tile": "the score is computed in Python (TileForm)",
    "soft_cap-learned-dot": "the score is computed in Python (SumForm)",
    "soft_cap-learned-heads-additive": "the score is computed in Python (SumForm)",
    "temperature-learned-of-soft_cap-bilinear": "the score is computed in Python (SumForm)",
    "soft_cap-learned-of-temperature-learned-of-soft_cap-gaussian": "the score is computed in Python (SumForm)",
    "temperature-learned-own-tile_gradient": "the score is computed in Python (SumForm)",
    "combination-mixed": "the score is computed in Python (SumForm)",
}


@dataclass(frozen=True, eq=False, repr=False)
class Checkered(ats.Mask):
    """A user's own mask, which says who sees whom and nothing else."""

    def visible(self, ops: Any, grid: Any, rows: Any, cols: Any) -> Any:
        return (rows + cols) % 2 == 0

    def check(self, ops: Any, grid: Any) -> None:
        pass


def plan_of(call: Any, framework: str = "numpy", **more: Any) -> Any:
    convert = tensor if framework == "torch" else np.asarray
    arrays = [convert(x) for x in (call.query, call.key, call.value)]
    own = {name: convert(x) for name, x in call.arrays.items()}
    extras = {n: convert(x) for n, x in (("bias", call.bias), ("sink", call.sink)) if x is not None}
    return ats.explain(*arrays, score=call.score.make(**own), **call.arguments, **extras, **more)


def reasons_of(plan: Any) -> list[str]:
    return list(plan.reasons.get("native", ()))


@each(score=SCORES, extras=tuple(EXTRAS), framework=("numpy", "torch"))
def test_every_score(score: Any, extras: str, framework: str) -> None:
    plan = plan_of(build_call(score, MASKS[0], "float32", extras), framework)
    left = SCORES_LEFT.get(score.name)
    assert (plan.kernel, reasons_of(plan)) == (("streaming", [left]) if left else ("native", []))


@each(mask=MASKS, dtype=DTYPES)
def test_every_mask(mask: Any, dtype: str) -> None:
    """Graphs are gathered first, and then computed by it."""
    plan = plan_of(build_call(SCORES[0], mask, dtype))
    gathered = mask.name.startswith("Neighbours") and mask.name not in ("Neighbours-or", "Neighbours-not")
    why = ["gather comes first in the order of preference"]
    assert (plan.kernel, reasons_of(plan)) == (("gather", why) if gathered else ("native", []))


def combinations() -> dict[str, Any]:
    """Every mask of the table with every tenth one, by & and |, and the complement of that."""
    objects = {case.name: case.arguments(Sizes())["mask"] for case in MASKS if "mask" in case.arguments(Sizes())}
    objects = {name: x if isinstance(x, ats.Mask) else ats.Dense(x) for name, x in objects.items()}
    found = {}
    for name, first in objects.items():
        for other in list(objects)[:: len(objects) // 5]:
            found[f"{name} & {other}"] = first & objects[other]
            found[f"~({name} | {other})"] = ~(first | objects[other])
            found[f"{name} | ~{other}"] = first | ~objects[other]
    return found


@pytest.mark.slow
def test_every_combination_of_masks() -> None:
    sizes, left = Sizes(), {}
    query, key = np.ones((2, 4, sizes.queries, 5), "f4"), np.ones((2, 2, sizes.keys, 5), "f4")
    for name, mask in combinations().items():
        try:
            plan = ats.explain(query, key, key, mask=mask)
        except ats.MaskError:
            continue  # rows of the table for other lengths
        if plan.kernel not in ("native", "gather"):
            left[name] = reasons_of(plan)
    assert not left


OWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dropout": {"dropout": 0.1, "seed": 0},
    "causal and an array": {"mask": CAUSAL & ats.Dense(ARRAY)},
    "causal and lengths": {"mask": CAUSAL, "valid_lens": [3, 9]},
    "an array and documents": {"mask": ats.Dense(ARRAY) & ats.Documents(np.arange(9) % 2)},
    "scattered keys": {"mask": ats.KeyPadding(ARRAY[:2])},
    "scattered keys and documents": {"mask": ats.KeyPadding(ARRAY[:2]) & ats.Documents(np.arange(9) % 2) & CAUSAL},
    "not": {"mask": ~CAUSAL},
    "all but a window": {"mask": ~ats.SlidingWindow(1, 1)},
    "sinks and a window": {"mask": ats.KeyRange(0, 2) & CAUSAL | ats.SlidingWindow(2, 0)},
    "global tokens and a window": {"mask": ats.KeyPadding(ARRAY[:2]) | ats.SlidingWindow(1, 1)},
    "neither of two": {"mask": ~(ats.KeyRange(2, 4) | ats.Dense(ARRAY))},
    "or an array": {"mask": CAUSAL | ats.Dense(ARRAY)},
    "two arrays": {"mask": ats.Dense(ARRAY) & ats.Dense(ARRAY[:1])},
    "scattered keys twice": {"mask": ats.KeyPadding(ARRAY[:2]) & ats.KeyPadding(ARRAY[2:4])},
    "an array and scattered keys": {"mask": ats.Dense(ARRAY) & ats.KeyPadding(ARRAY[:2])},
    "an array for each batch row": {"mask": ats.Causal(offset=[1, 2]) | ats.Dense(ARRAY)},
    "or documents": {"mask": CAUSAL | ats.Documents(np.arange(9) % 2)},
    "two arrays, larger together": {"mask": ats.Dense(ARRAY[:, :1]) & ats.Dense(ARRAY[:1])},
    "a view of a row": {"mask": CAUSAL | ats.Dense(np.broadcast_to(ARRAY[0], (9, 9)))},
    "scattered keys, or documents": {"mask": ats.KeyPadding(ARRAY[:2]) | ats.Documents(np.arange(9) % 2)},
    "a function": {"mask": ats.MaskFunction(lambda b, h, i, j: (i + 2 * j) % 5 < 2)},
    "a function of heads": {"mask": ats.MaskFunction(lambda b, h, i, j: i <= j + h) | ats.Dense(ARRAY)},
    "a mask of one's own": {"mask": Checkered() & CAUSAL},
    "two documents": {"mask": ats.Documents(np.arange(9) % 2) & ats.Documents(np.arange(9) % 3)},
    "a bias in float64": {"bias": np.zeros((9, 9))},
    "a bias in bfloat16": {"bias": np.zeros((9, 9), ml_dtypes.bfloat16)},
    "a sink in float64": {"sink": np.zeros(4)},
    "a scale per query": {"score": ats.ScaledDot(np.ones((9, 1), "f4"))},
    "a scale in float64": {"score": ats.ScaledDot(np.ones(()))},
    "weights in float64": {"score": ats.Additive(np.ones(5))},
    "projections in float64": {"score": ats.Additive(np.ones(3), np.ones((3, 5)), np.ones((3, 5)))},
    "a bandwidth": {"score": ats.Gaussian(0.01)},
    "a learned bandwidth": {"score": ats.Gaussian(np.full((), 0.01, "f4"))},
    "bandwidths": {"score": ats.Gaussian(np.full(4, 0.01, "f4"))},
    "bandwidths in float64": {"score": ats.Gaussian(np.full(4, 0.01))},
    "a scale per head": {"score": ats.ScaledDot(np.ones(4, "f4"))},
    "two caps": {"score": ats.SoftCap(ats.Temperature(ats.SoftCap("dot", 30.0), 2.0), 3.0)},
    "all at once": {
        "score": ats.SoftCap("scaled_dot", 30.0), "mask": CAUSAL & ats.Dense(ARRAY), "valid_lens": [3, 9],
        "bias": np.zeros((4, 1, 9), "f4"), "sink": np.zeros(4, "f4"), "dropout": 0.1, "seed": 0,
    },
}  # fmt: skip

LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "a bias of long doubles": ({"bias": np.zeros((9, 9), np.longdouble)}, "bias of dtype"),
    "a score in Python": ({"score": OwnPlain()}, "the score is computed in Python (TileForm)"),
}
X = np.random.default_rng(0).standard_normal((2, 4, 9, 5)).astype("f4")


@pytest.mark.parametrize("name", OWN)
def test_what_native_takes(name: str) -> None:
    plan = ats.explain(X, X, X, **OWN[name])
    assert (plan.kernel, reasons_of(plan)) == ("native", [])
    ats.attend(X, X, X, **OWN[name], kernel="native")


@pytest.mark.parametrize("name", LEFT)
def test_what_it_leaves_and_why(name: str) -> None:
    arguments, reason = LEFT[name]
    plan = ats.explain(X, X, X, **arguments)
    assert plan.kernel == "streaming"
    assert len(reasons_of(plan)) == 1
    assert reason in reasons_of(plan)[0]
    with pytest.raises(ats.KernelUnavailable, match="a call that 'native' can run"):
        ats.attend(X, X, X, **arguments, kernel="native")


LAYOUTS = {
    "transposed": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "every second": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "backwards": lambda x: x[..., ::-1, :],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "no queries": lambda x: x[..., :0, :],
    "no heads": lambda x: x[:, :0],
    "no batch": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_falls_off(layout: str) -> None:
    x = LAYOUTS[layout](X)
    assert ats.explain(x, x, x).kernel == "native"


UNREADABLE = {
    "big endian": lambda: X.astype(">f4"),
    "long doubles": lambda: X.astype(np.longdouble),
    "off its elements": lambda: np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view("f4").reshape(X.shape),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_memory_that_it_cannot_read_is_left_to_streaming(name: str) -> None:
    """And gives the same result there."""
    x = UNREADABLE[name]()
    plan = ats.explain(x, x, x)
    assert plan.kernel == "streaming", reasons_of(plan)
    np.testing.assert_allclose(ats.attend(x, x, x).astype("f4"), ats.attend(X, X, X), atol=1e-6)


def test_torch_tensors_with_a_gradient_stay_native() -> None:
    x = torch.tensor(X, requires_grad=True)
    assert ats.explain(x, x, x).kernel == "native"
    assert ats.explain(x.double(), x.double(), x.double()).kernel == "native"
    assert ats.explain(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2), head_axis=-2).kernel == "native"
    meta = x.detach().to("meta")
    plan = ats.explain(meta, meta, meta)
    assert plan.kernel == "streaming"
    assert "whose memory the CPU cannot read" in reasons_of(plan)[0]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_misaligned_and_negated_arrays_are_left_to_streaming(framework: str) -> None:
    """A reason names the array; the numbers equal a copy's."""
    convert = tensor if framework == "torch" else np.asarray
    query = np.random.default_rng(0).standard_normal((1, 3, 4)).astype(np.float32)
    misaligned = np.zeros(query.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(query.shape)
    misaligned[:] = query
    arrays = [(torch.from_numpy if framework == "torch" else np.asarray)(misaligned)]
    if framework == "torch":
        arrays.append(torch.complex(tensor(query), -tensor(query)).conj().imag)
    for x in arrays:
        key = convert(query)
        found = ats.explain(x, key, key).reasons["native"]
        assert found[0].startswith("query: arrays whose memory the CPU cannot read (")
        assert "misaligned, lazily negated" in found[0]
        np.testing.assert_allclose(ats.attend(x, key, key), ats.attend(key, key, key), rtol=1e-6, atol=1e-6)
