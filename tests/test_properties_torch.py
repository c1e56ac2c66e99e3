"""Laws on PyTorch: it says what NumPy says, forward and backward; differentiable weights and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnscore as ats
from strategies import Drawn, calls, law, same, tiles_of


def on_torch(call: Drawn) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Query, key and value as leaves, and the rest, the score's arrays as leaves too."""
    leaves = {name: torch.tensor(getattr(call, name), requires_grad=True) for name in ("query", "key", "value")}
    score = call.score
    if not isinstance(score, str):
        fields = {
            name: torch.tensor(x, requires_grad=True) if isinstance(x, np.ndarray) else x
            for name, x in vars(score).items()
        }
        score = type(score)(**fields)
        leaves |= {f"score.{name}": x for name, x in fields.items() if isinstance(x, torch.Tensor)}
    return leaves, {"score": score, "mask": call.mask}


def _attend_torch(leaves: dict[str, torch.Tensor], rest: dict[str, Any], **more: Any) -> Any:
    return ats.attend(leaves["query"], leaves["key"], leaves["value"], **rest, **more)


@law
@given(calls(), st.sampled_from((0.0, 0.3)), st.integers(1, 60), st.sampled_from(("auto", "streaming")))
def test_torch_says_what_numpy_says(call: Drawn, dropout: float, scores: int, kernel: str) -> None:
    leaves, rest = on_torch(call)
    more: dict[str, Any] = {"dropout": dropout, "seed": 3, "kernel": kernel}
    expected = call.attend(return_weights=True, return_stats=True, **more)
    grad_out, grad_rows = call.normal(*expected[0].shape), call.normal(*call.query.shape[:-1])
    with tiles_of(scores):
        out, weights, stats = _attend_torch(leaves, rest, return_weights=True, return_stats=True, **more)
        for found, known in zip((out, weights, *stats), (*expected[:2], *expected[2]), strict=True):
            same(found.detach(), known, 1e-10)
        grads = torch.autograd.grad(
            (out, stats.log_sum_exp, stats.entropy),
            tuple(leaves.values()),
            tuple(torch.tensor(x) for x in (grad_out, grad_rows, grad_rows)),
        )
    known = call.gradients(grad_out, grad_rows, grad_rows, **more)
    for name, grad in zip(leaves, grads, strict=True):
        same(grad, known[name], 1e-9)


@law
@given(calls(min_query=1, min_key=1))
def test_returned_weights_and_scores_are_differentiable(call: Drawn) -> None:
    """<weights, c> has the gradient of the output for values c, where both are taken."""
    leaves, rest = on_torch(call)
    eye = torch.eye(call.key_len, dtype=torch.float64).expand(*call.key.shape[:-1], call.key_len)
    through_out = ats.attend(leaves["query"], leaves["key"], eye, **rest)
    through_weights = ats.attention_weights(leaves["query"], leaves["key"], **rest)
    grad = torch.tensor(call.normal(*through_out.shape))
    names = [name for name in leaves if name != "value"]
    wanted = tuple(leaves[name] for name in names)
    first = torch.autograd.grad(through_out, wanted, grad)
    second = torch.autograd.grad(through_weights, wanted, grad)
    for one, other in zip(first, second, strict=True):
        same(other, one, 1e-9)
    scores = ats.attention_scores(leaves["query"], leaves["key"], **rest)
    assert scores.requires_grad
    law_of_scores: Callable[..., Any] = torch.softmax
    some = torch.tensor(call.visible.any(-1))
    same(law_of_scores(scores, -1)[some].detach(), through_weights[some].detach())
