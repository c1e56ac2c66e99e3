"""What a result must be before anybody times it: the textbook in float64, and how far from it a result may lie.

What this module meets:
- the reference is written from the formulas, in PyTorch, and uses nothing of this library (with dropout, whose mask
  only the library knows, it is the oracle kernel in float64);
- error <= max(2 x the error of the same formulas in the dtype of the case, 8 eps x scale), where the scale of an output
  is max |value| and that of a gradient the same sum with the absolute values of its terms;
- it works on blocks of queries: a large case is checked on some of its rows, those at both ends among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnscore.bench.inputs import Inputs, ours
from attnscore.errors import AttnscoreError

_BLOCK = 2**24  # numbers in the largest array of a block: 128 MB in float64
_WHOLE = 2**28  # terms up to which all rows are checked, about 3 s in float64
_ROWS = 96


class WrongResult(AttnscoreError, RuntimeError):
    """A side of a benchmark computed something else than it should have."""


@dataclass(frozen=True)
class Reference:
    """Exact outputs, those of the plain version, and the scale of each; `rows` are the queries that are compared."""

    exact: tuple[Any, ...]
    plain: tuple[Any, ...]
    scale: tuple[float, ...]
    eps: float
    rows: Any

    def check(self, name: str, outputs: Sequence[Any], slack: float = 1.0) -> dict[str, float]:
        """The error of the worst output with what is allowed; `WrongResult` where it is larger."""
        worst: dict[str, float] = {}
        if len(outputs) != len(self.exact):
            raise WrongResult(f"{name}: expected {len(self.exact)} results, got {len(outputs)}")
        for found, exact, plain, scale in zip(outputs, self.exact, self.plain, self.scale, strict=True):
            x = _plain_array(found)
            if exact is self.exact[0]:
                x = x.reshape(exact.shape[0], -1, exact.shape[-1])[:, self.rows]
            x = x.reshape(exact.shape)
            plain_error = _largest(plain - exact)
            allowed = max(2 * plain_error, 8 * self.eps * scale)
            mine = {"error": _largest(x - exact), "plain": plain_error, "allowed": allowed}
            if not worst or mine["error"] / allowed > worst["error"] / worst["allowed"]:
                worst = mine
        if not worst["error"] <= slack * worst["allowed"]:
            raise WrongResult(
                f"{name}: error {worst['error']:.3g}, allowed {worst['allowed']:.3g} (plain {worst['plain']:.3g})"
            )
        return worst


def reference(inputs: Inputs) -> Reference:
    """The reference of a case."""
    import torch

    case = inputs.case
    terms = case.pairs() * (case.sizes["dim"] if case.score == "additive" else 8)
    queries = case.sizes["queries"]
    some = not case.backward and "dropout" not in case.options and terms > _WHOLE and queries > _ROWS
    rows = np.unique(np.linspace(0, queries - 1, _ROWS).astype(int)) if some else np.arange(queries)
    dtype = getattr(torch, case.dtype)
    if "dropout" in case.options:
        exact, plain = (_oracle(inputs, to) for to in (torch.float64, dtype))
        rate = 1 / (1 - case.options["dropout"])
    else:
        exact, plain = (_textbook(inputs, rows, to) for to in (torch.float64, dtype))
        rate = 1.0
    scale = tuple(rate * x for x in _scales(inputs, rows))
    arrays = [tuple(_plain_array(x) for x in found) for found in (exact, plain)]
    return Reference(arrays[0], arrays[1], scale, float(torch.finfo(dtype).eps), rows)


def _plain_array(x: Any) -> Any:
    if hasattr(x, "detach"):
        x = x.detach().double().numpy()
    return np.asarray(x, np.float64)


def _largest(x: Any) -> float:
    found = float(np.abs(x).max(initial=0))
    return found if math.isfinite(found) else math.inf


def _flat(inputs: Inputs, dtype: Any) -> dict[str, Any]:
    """The arrays as (matrix, row, dim) tensors of a dtype, cut off from autograd."""
    import torch

    def tensor(x: Any) -> Any:
        # A copy: JAX and TensorFlow show their memory read-only, which torch warns about.
        found = (x if hasattr(x, "detach") else torch.from_numpy(np.array(x))).detach().to(dtype)
        return found if found.ndim == 1 else found.reshape(-1, *found.shape[-2:])

    return {name: tensor(getattr(inputs, name)) for name in ("query", "key", "value", "w_v", "grad")}


def _blocks(inputs: Inputs, rows: Any) -> list[Any]:
    case = inputs.case
    width = case.sizes["keys"] * (case.sizes["dim"] if case.score == "additive" else 1)
    return list(np.array_split(rows, max(1, math.ceil(len(rows) * width / _BLOCK))))


def scores(inputs: Inputs, query: Any, key: Any, w_v: Any) -> Any:
    """The scores by their definition."""
    if inputs.case.score == "additive":
        return (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh() @ w_v
    return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])


def _textbook(inputs: Inputs, rows: Any, dtype: Any) -> tuple[Any, ...]:
    """Output and gradients by the definition in one dtype, matrix by matrix and block by block."""
    import torch

    x, case, visible = _flat(inputs, dtype), inputs.case, inputs.visible()
    names = ["query", "key", "value", *(["w_v"] if case.score == "additive" else [])] if case.backward else []
    out = torch.zeros(len(x["query"]), len(rows), x["value"].shape[-1], dtype=dtype)
    grads = {name: torch.zeros_like(x[name]) for name in names}
    for matrix in range(len(out)):
        done = 0
        for block in _blocks(inputs, rows):
            leaves = {name: x[name][matrix] for name in ("key", "value")}
            leaves |= {"query": x["query"][matrix, block], "w_v": x["w_v"]}
            leaves = {name: leaf.clone().requires_grad_(name in names) for name, leaf in leaves.items()}
            s = scores(inputs, leaves["query"], leaves["key"], leaves["w_v"])
            if visible is not None:
                s = s.masked_fill(~torch.from_numpy(visible[block]), -math.inf)
            block_out = s.softmax(-1) @ leaves["value"]
            out[matrix, done : done + len(block)] = block_out.detach()
            done += len(block)
            found = (
                torch.autograd.grad(block_out, [leaves[n] for n in names], x["grad"][matrix, block]) if names else ()
            )
            for name, grad in zip(names, found, strict=True):
                where: Any = {"query": (matrix, block), "w_v": ...}.get(name, matrix)
                grads[name][where] += grad
    return (out, *grads.values())


def _scales(inputs: Inputs, rows: Any) -> tuple[float, ...]:
    """max |value|; for gradients their formulas with the absolute value of every term."""
    import torch

    x, case, visible = _flat(inputs, torch.float64), inputs.case, inputs.visible()
    found = {"out": float(x["value"].abs().max())}
    if not case.backward:
        return tuple(found.values())
    largest: dict[str, Any] = {}
    for matrix in range(len(x["query"])):
        query, key, value, grad = (x[name][matrix] for name in ("query", "key", "value", "grad"))
        totals: dict[str, Any] = {"query": [], "key": 0, "value": 0, "w_v": 0}
        for block in _blocks(inputs, rows):
            s = scores(inputs, query[block], key, x["w_v"])
            if visible is not None:
                s = s.masked_fill(~torch.from_numpy(visible[block]), -math.inf)
            p = s.softmax(-1)
            incoming = grad[block].abs() @ value.abs().T
            ds = p * (incoming + (p * incoming).sum(-1, keepdim=True))
            totals["value"] += p.T @ grad[block].abs()
            if case.score == "additive":
                totals["query"].append(ds.sum(-1, keepdim=True) * x["w_v"].abs())
                totals["key"] += ds.sum(0)[:, None] * x["w_v"].abs()
                totals["w_v"] += ds.sum()
            else:
                scale = 1 / math.sqrt(query.shape[-1])
                totals["query"].append(ds @ key.abs() * scale)
                totals["key"] += ds.T @ query[block].abs() * scale
        totals["query"] = torch.cat(totals["query"])
        for name, total in totals.items():
            most = float(torch.as_tensor(total).max())
            # The gradient of w_v is a sum over all matrices, the others belong to one.
            largest[name] = largest.get(name, 0.0) + most if name == "w_v" else max(largest.get(name, 0.0), most)
    order = ("query", "key", "value", *(("w_v",) if case.score == "additive" else ()))
    return (found["out"], *(largest[name] for name in order))


def _oracle(inputs: Inputs, dtype: Any) -> tuple[Any, ...]:
    """Output and gradients by the oracle kernel in one dtype."""
    cast = {
        name: getattr(inputs, name).detach().to(dtype).requires_grad_(inputs.case.backward and name != "grad")
        for name in ("query", "key", "value", "w_v", "grad")
    }
    side = ours(replace(inputs, **cast), kernel="dense")
    out, *grads = side.outputs(side.run())
    return (out.reshape(-1, *out.shape[-2:]), *(g.reshape(-1, *g.shape[-2:]) if g.ndim > 1 else g for g in grads))
