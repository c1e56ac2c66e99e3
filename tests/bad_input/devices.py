"""Arrays that lie on different devices; PyTorch's "meta" stands for any second device."""

from __future__ import annotations

from typing import Any

import torch

import attnscore as ats
from attnscore import DeviceError
from bad_input.table import Maker, case


def _away(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="meta")


def _additive(x: Maker, **given: Any) -> Any:
    return x.attend(score=ats.Additive(**{"w_v": x.floats(8), "W_q": x.floats(8, 4), "W_k": x.floats(8, 4)} | given))


def _two(name: str, shape: tuple[int, ...], call: Any) -> Any:
    """A row whose call gets an array `name` that lies elsewhere."""
    return case(
        f"{name} elsewhere",
        DeviceError,
        f"{name}|an array on cpu, where query is|meta",
        lambda x: call(x, **{name: _away(*shape)}),
        only="torch",
    )


_EVERY = (
    _two("key", (2, 5, 4), Maker.attend),
    _two("value", (2, 5, 6), Maker.attend),
    _two("bias", (3, 5), Maker.attend),
    _two("sink", (1,), Maker.attend),
    _two("w_v", (8,), _additive),
    _two("W_q", (8, 4), _additive),
    _two("W_k", (8, 4), _additive),
    _two("W", (4, 4), lambda x, W: x.attend(score=ats.Bilinear(W))),
    _two("scale", (1,), lambda x, scale: x.attend(score=ats.ScaledDot(scale))),
    _two("bandwidth", (1,), lambda x, bandwidth: x.attend(score=ats.Gaussian(bandwidth))),
)

CASES = (
    *_EVERY,
    case(
        "query elsewhere",
        DeviceError,
        "key|an array on meta, where query is|cpu",
        lambda x: x.attend(query=_away(2, 3, 4)),
        only="torch",
    ),
    case(
        "key elsewhere, for weights", DeviceError, "key|cpu|meta", lambda x: x.weights(key=_away(2, 5, 4)), only="torch"
    ),
    case(
        "lengths elsewhere",
        DeviceError,
        "valid_lens|cpu|meta",
        lambda x: x.attend(valid_lens=_away(2, dtype=torch.int64)),
        only="torch",
    ),
    case(
        "mask elsewhere",
        DeviceError,
        "mask|cpu|meta",
        lambda x: x.attend(mask=_away(3, 5, dtype=torch.bool)),
        only="torch",
    ),
    case(
        "merge across devices",
        DeviceError,
        "outs[1]|cpu|meta",
        lambda x: ats.merge([x.floats(3, 2), _away(3, 2)], [x.floats(3), x.floats(3)]),
        only="torch",
    ),
    case(
        "VJP across devices",
        DeviceError,
        "grad|cpu|meta",
        lambda x: ats.softmax_pullback(x.floats(3), _away(3)),
        only="torch",
    ),
    case(
        "mask of a softmax elsewhere",
        DeviceError,
        "mask|cpu|meta",
        lambda x: x.softmax(mask=_away(3, 5, dtype=torch.bool)),
        only="torch",
    ),
)
