"""Calls of `attend` on MXNet arrays, for tests that run in another environment: theirs has no MXNet, this one no torch.

Reads requests from standard input and answers each on standard output, until the input ends. A request names a row of
the tables of ``cases`` and brings its arrays.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

with warnings.catch_warnings():
    # MXNet's own, on NumPy 1.23.
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attnscore as ats
from attnscore.base import thresholds
from cases import MASK, SCORE, Sizes
from in_mxnet.exchange import receive, send


def mxnet_array(x: np.ndarray) -> Any:
    with mx.util.np_shape(True):
        return mx.np.array(x, dtype=x.dtype)


def answer(row: dict[str, Any], given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs, statistics and gradients of the call that `row` names over the arrays that are `given`."""
    score, mask = SCORE[row["score"]], MASK[row["mask"]].arguments(Sizes(**row["sizes"]))
    leaves = {name: mxnet_array(x) for name, x in given.items() if not name.startswith("seed.")}
    seeds = {name.removeprefix("seed."): mxnet_array(x) for name, x in given.items() if name.startswith("seed.")}
    for x in leaves.values():
        x.attach_grad()
    arguments = {name: mxnet_array(x) if isinstance(x, np.ndarray) else x for name, x in mask.items()}
    arguments |= {name: leaves[name] for name in ("bias", "sink") if name in leaves}
    own = {name.removeprefix("score."): x for name, x in leaves.items() if name.startswith("score.")}
    three = leaves["query"], leaves["key"], leaves["value"]
    with mx.autograd.record():
        out, *weights, stats = ats.attend(
            *three, score=score.make(**own), return_stats=True, return_weights="weights" in seeds, **arguments,
            **row["options"],
        )  # fmt: skip
    outputs = {"out": out, **stats._asdict(), **({"weights": weights[0]} if weights else {})}
    mx.autograd.backward([outputs[name] for name in seeds], list(seeds.values()))
    found = outputs | {f"grad.{name}": x.grad for name, x in leaves.items()}
    kinds = {type(x) for x in found.values()}
    assert kinds == {mx.np.ndarray}, kinds
    return {name: x.asnumpy() for name, x in found.items()}


def main() -> None:
    # Whatever prints goes elsewhere: standard output carries the answers.
    stdout, sys.stdout = sys.stdout.buffer, sys.stderr
    usual = thresholds.TILE_SCORES, thresholds.SMALLEST_TILE, thresholds.INNER_TERMS
    while (request := receive(sys.stdin.buffer)) is not None:
        row = json.loads(str(request.pop("row")))
        small = 1, 4, 0
        thresholds.TILE_SCORES, thresholds.SMALLEST_TILE, thresholds.INNER_TERMS = (
            small if row["small_tiles"] else usual
        )
        # Those who have arrays of length 0 have said so: npx.set_np() for the whole of their program.
        with_zeros = any(not x.shape or 0 in x.shape for x in request.values())
        try:
            with mx.util.np_shape(with_zeros):
                found = answer(row, request)
        except Exception as error:
            found = {"error": np.array(f"{type(error).__name__}: {error}")}
        send(stdout, found)


if __name__ == "__main__":
    main()
