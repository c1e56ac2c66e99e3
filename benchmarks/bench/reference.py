"""Reference results: the definition in float64, and the tolerance of a result before it is timed.

- The reference is written from the formulas, in PyTorch, and uses nothing of this library (with dropout, whose mask
  only the library knows, it is the dense kernel in float64).
- error <= max(2 x the error of the same formulas in the dtype of the case, 8 eps x scale), where the scale of an output
  is max |value| and the scale of a gradient the same sum with the absolute values of its terms. Both grow with Gaussian
  scores beyond 8: eps |score| is a relative error of a weight.
- It works on blocks of matrices and queries: a large case is checked on some queries, those at both ends among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnscore.errors import AttnscoreError
from bench.inputs import Inputs, ours

_BLOCK = 2**24  # numbers in the largest array of a block: 128 MB in float64
_WHOLE = 2**28  # terms up to which all queries are checked, about 3 s in float64
_ROWS = 96


class WrongResult(AttnscoreError, RuntimeError):
    """A side of a benchmark computed something else than it should have."""


@dataclass(frozen=True)
class Reference:
    """Exact outputs, the plain version's outputs, and the scale of each; `rows` are the queries that are compared."""

    exact: tuple[Any, ...]
    plain: tuple[Any, ...]
    scale: tuple[float, ...]
    eps: float
    rows: Any

    def check(self, name: str, outputs: Sequence[Any], slack: float = 1.0) -> dict[str, float]:
        """Return the error of the worst output with the allowed one; `WrongResult` where it is larger."""
        if len(outputs) != len(self.exact):
            raise WrongResult(f"{name}: expected {len(self.exact)} results, got {len(outputs)}")
        errors = []
        for place, (found, exact, plain, scale) in enumerate(
            zip(outputs, self.exact, self.plain, self.scale, strict=True)
        ):
            x = _float64(found)
            if place == 0:
                x = x.reshape(exact.shape[0], -1, exact.shape[-1])[:, self.rows]
            plain_error = _largest(plain - exact)
            allowed = max(2 * plain_error, 8 * self.eps * scale)
            errors.append({"error": _largest(x.reshape(exact.shape) - exact), "plain": plain_error, "allowed": allowed})
        worst = max(errors, key=lambda each: each["error"] / each["allowed"])
        if not worst["error"] <= slack * worst["allowed"]:
            raise WrongResult(
                f"{name}: error {worst['error']:.3g}, allowed {worst['allowed']:.3g} (plain {worst['plain']:.3g})"
            )
        return worst


def reference(inputs: Inputs) -> Reference:
    """Compute the reference of a case."""
    import torch

    case = inputs.case
    dropout, queries = case.options.get("dropout", 0), case.sizes["queries"]
    terms = case.pairs() * (case.sizes["dim"] if case.has_parameter else 8)
    some = not case.backward and not dropout and terms > _WHOLE and queries > _ROWS
    rows = np.unique(np.linspace(0, queries - 1, _ROWS).astype(int)) if some else np.arange(queries)
    dtype = getattr(torch, case.dtype)
    exact, plain = (
        tuple(_float64(x) for x in (_dense(inputs, to) if dropout else _definition(inputs, rows, to)))
        for to in (torch.float64, dtype)
    )
    factor = _score_rounding(inputs) / (1 - dropout)
    scale = tuple(factor * x for x in _scales(inputs, rows))
    return Reference(exact, plain, scale, float(torch.finfo(dtype).eps), rows)


def _float64(x: Any) -> Any:
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x, np.float64)


def relative_difference(found: Any, wanted: Any) -> float:
    """Return the largest difference of two arrays over the largest number of the second; infinite if shapes differ."""
    x, y = _float64(found), _float64(wanted)
    return float(np.abs(x - y).max() / np.abs(y).max()) if x.shape == y.shape else math.inf


def _largest(x: Any) -> float:
    found = float(np.abs(x).max(initial=0))
    return found if math.isfinite(found) else math.inf


def _tensors(inputs: Inputs, dtype: Any) -> dict[str, Any]:
    """The inputs as (matrix, row, dim) tensors of a dtype, without gradients."""
    import torch

    def tensor(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: tensor(each) for name, each in x.items()}
        # A copy: JAX and TensorFlow show their memory read-only, which torch warns about.
        found = (x if hasattr(x, "detach") else torch.from_numpy(np.array(x))).detach().to(dtype)
        return found

    arrays = {name: tensor(getattr(inputs, name)) for name in ("query", "key", "value", "grad")}
    arrays = {name: x.reshape(-1, *x.shape[-2:]) for name, x in arrays.items()}
    return {**arrays, "parameter": tensor(inputs.parameter)}


def _names(inputs: Inputs) -> list[str]:
    """Inputs that get a gradient, in the order of the results."""
    return ["query", "key", "value", *(["parameter"] if inputs.case.has_parameter and not inputs.case.layer else [])]


def _width(inputs: Inputs) -> int:
    """Numbers that a query takes in the largest array."""
    return int(inputs.case.sizes["keys"] * (inputs.case.sizes["dim"] if inputs.case.has_parameter else 1))


def _blocks(inputs: Inputs, rows: Any) -> list[Any]:
    return list(np.array_split(rows, max(1, math.ceil(len(rows) * _width(inputs) / _BLOCK))))


def _matrices(inputs: Inputs, rows: Any) -> Iterator[slice]:
    """Ranges of the batch and its heads that are computed at once."""
    count = inputs.case.sizes["batch"] * max(1, inputs.case.sizes["heads"])
    step = max(1, _BLOCK // (len(rows) * _width(inputs)))
    return (slice(start, start + step) for start in range(0, count, step))


def _projected(inputs: Inputs, query: Any, key: Any, parameter: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and parameter as the score gets them: in a layer after its projections."""
    if inputs.case.layer and inputs.case.score == "additive":
        return query @ parameter["W_q.weight"].mT, key @ parameter["W_k.weight"].mT, parameter["w_v.weight"].squeeze(0)
    return query, key, parameter["W.weight"] if inputs.case.layer and inputs.case.score == "bilinear" else parameter


def _weights(inputs: Inputs, where: tuple[slice, Any], query: Any, key: Any, parameter: Any) -> Any:
    """The weights of some queries of some matrices by the definition."""
    import torch

    query, key, parameter = _projected(inputs, query, key, parameter)
    if inputs.case.score == "additive":
        scores = (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh() @ parameter
    elif inputs.case.score == "gaussian":
        scores = -(query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1) / (2 * parameter**2)
    elif inputs.case.score == "bilinear":
        scores = query @ parameter @ key.mT
    else:
        scores = query @ key.mT / math.sqrt(query.shape[-1])
    allowed = inputs.allowed()
    if allowed is not None:
        # With a batch there are no heads.
        its = allowed[where] if allowed.ndim == 3 else allowed[where[1]]
        scores = scores.masked_fill(~torch.from_numpy(its), -math.inf)
    return scores.softmax(-1)


def _definition(inputs: Inputs, rows: Any, dtype: Any) -> tuple[Any, ...]:
    """Output, with weights or gradients where the case has them, by the definition in one dtype, block by block."""
    import torch

    x, case = _tensors(inputs, dtype), inputs.case
    names = _names(inputs) if case.backward else []
    out = torch.zeros(len(x["query"]), len(rows), x["value"].shape[-1], dtype=dtype)
    weights = torch.zeros(*out.shape[:2], case.sizes["keys"] if case.weights else 0, dtype=dtype)
    grads = {name: torch.zeros_like(x[name]) for name in names}
    for matrices in _matrices(inputs, rows):
        done = 0
        for block in _blocks(inputs, rows):
            at: dict[str, Any] = {"query": (matrices, block), "key": matrices, "value": matrices, "parameter": ...}
            leaves = {n: x[n] if isinstance(x[n], dict) else x[n][place].clone() for n, place in at.items()}
            for name in names:
                leaves[name].requires_grad_()
            p = _weights(inputs, (matrices, block), leaves["query"], leaves["key"], leaves["parameter"])
            block_out, end = p @ leaves["value"], done + len(block)
            out[matrices, done:end] = block_out.detach()
            if case.weights:
                weights[matrices, done:end] = p.detach()
            done = end
            if names:
                found = torch.autograd.grad(block_out, [leaves[n] for n in names], x["grad"][matrices, block])
                for name, grad in zip(names, found, strict=True):
                    grads[name][at[name]] += grad
    return (out, *([weights] if case.weights else ()), *grads.values())


def _score_rounding(inputs: Inputs) -> float:
    """Return the factor by which the rounding of large Gaussian scores adds to errors: they grow with sqrt(dim)."""
    if inputs.case.score != "gaussian":
        return 1.0
    norms = (float(np.square(_float64(x)).sum(-1).max()) for x in (inputs.query, inputs.key))
    return max(1.0, sum(norms) / (2 * float(_float64(inputs.parameter)) ** 2) / 8)


def _scales(inputs: Inputs, rows: Any) -> Iterator[float]:
    """max |value|, 1 for weights; for gradients their formulas with the absolute value of every term."""
    import torch

    x, case = _tensors(inputs, torch.float64), inputs.case
    yield float(x["value"].abs().max())
    if case.weights:
        yield 1.0
    if not case.backward:
        return
    largest = dict.fromkeys(_names(inputs), 0.0)
    for matrices in _matrices(inputs, rows):
        raw_query, raw_key, value, grad = (x[name][matrices] for name in ("query", "key", "value", "grad"))
        query, key, parameter = _projected(inputs, raw_query, raw_key, x["parameter"])
        parameter = parameter.abs() if case.has_parameter else parameter
        totals: dict[str, Any] = {"query": [], "key": 0, "value": 0, "parameter": 0}
        for block in _blocks(inputs, rows):
            p = _weights(inputs, (matrices, block), raw_query[:, block], raw_key, x["parameter"])
            its, incoming = query[:, block], grad[:, block].abs() @ value.abs().mT
            ds = p * (incoming + (p * incoming).sum(-1, keepdim=True))
            by_query, by_key = ds.sum(-1, keepdim=True), ds.sum(-2).unsqueeze(-1)
            totals["value"] += p.mT @ grad[:, block].abs()
            if case.score == "additive":
                totals["query"].append(by_query * parameter)
                totals["key"] += by_key * parameter
                totals["parameter"] += ds.sum()
            elif case.score == "bilinear":
                totals["query"].append(ds @ (key.abs() @ parameter.mT))
                totals["key"] += ds.mT @ (its.abs() @ parameter)
                totals["parameter"] += (its.abs().mT @ ds @ key.abs()).sum(0)
            else:
                scale = 1 / math.sqrt(query.shape[-1]) if case.score == "scaled_dot" else 1 / parameter**2
                totals["query"].append(ds @ key.abs() * scale)
                totals["key"] += ds.mT @ its.abs() * scale
            if case.score == "gaussian":  # of a difference both terms
                totals["query"][-1] += by_query * its.abs() * scale
                totals["key"] += by_key * key.abs() * scale
                totals["parameter"] += (ds * torch.cdist(its, key).square()).sum() / parameter**3
        totals["query"] = torch.cat(totals["query"], 1)
        if case.layer and case.score == "additive":
            for name in ("query", "key"):
                totals[name] = totals[name] @ x["parameter"][f"W_{name[0]}.weight"].abs()
        for name in largest:
            most = float(torch.as_tensor(totals[name]).max())
            # The gradient of the parameter is a sum over all matrices, the others belong to one.
            largest[name] = largest[name] + most if name == "parameter" else max(largest[name], most)
    yield from largest.values()


def _dense(inputs: Inputs, dtype: Any) -> tuple[Any, ...]:
    """Output and gradients by the dense kernel in one dtype."""
    cast = {
        name: getattr(inputs, name).detach().to(dtype).requires_grad_(inputs.case.backward and name != "grad")
        for name in ("query", "key", "value", "parameter", "grad")
    }
    side = ours(replace(inputs, **cast), kernel="dense")
    found = side.outputs(side.run())
    return tuple(x.reshape(-1, *x.shape[-2:]) if x.ndim > 1 else x for x in found)
