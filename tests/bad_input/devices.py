"""Arrays that lie on different devices; PyTorch's "meta" stands for any second device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import attnscore as ats
from attnscore import DeviceError
from bad_input.table import Maker, Rows, cases


def _away(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="meta")


def _additive(x: Maker, **given: Any) -> Any:
    return x.attend(score=ats.Additive(**{"w_v": x.floats(8), "W_q": x.floats(8, 4), "W_k": x.floats(8, 4)} | given))


# Where the array of a name lies elsewhere, by its shape.
_EVERY: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "key": ((2, 5, 4), Maker.attend),
    "value": ((2, 5, 6), Maker.attend),
    "bias": ((3, 5), Maker.attend),
    "sink": ((1,), Maker.attend),
    "w_v": ((8,), _additive),
    "W_q": ((8, 4), _additive),
    "W_k": ((8, 4), _additive),
    "W": ((4, 4), lambda x, W: x.attend(score=ats.Bilinear(W))),
    "scale": ((1,), lambda x, scale: x.attend(score=ats.ScaledDot(scale))),
    "bandwidth": ((1,), lambda x, bandwidth: x.attend(score=ats.Gaussian(bandwidth))),
}

_ROWS: Rows = {
    **{
        f"{name} elsewhere": (
            f"{name}|an array on cpu, where query is|meta",
            lambda x, name=name, shape=shape, call=call: call(x, **{name: _away(*shape)}),
        )
        for name, (shape, call) in _EVERY.items()
    },
    "query elsewhere": ("key|an array on meta, where query is|cpu", lambda x: x.attend(query=_away(2, 3, 4))),
    "key elsewhere, for weights": ("key|cpu|meta", lambda x: x.weights(key=_away(2, 5, 4))),
    "lengths elsewhere": ("valid_lens|cpu|meta", lambda x: x.attend(valid_lens=_away(2, dtype=torch.int64))),
    "mask elsewhere": ("mask|cpu|meta", lambda x: x.attend(mask=_away(3, 5, dtype=torch.bool))),
    "merge across devices": (
        "outs[1]|cpu|meta",
        lambda x: ats.merge([x.floats(3, 2), _away(3, 2)], [x.floats(3), x.floats(3)]),
    ),
    "VJP across devices": ("grad|cpu|meta", lambda x: ats.softmax_pullback(x.floats(3), _away(3))),
    "mask of a softmax elsewhere": ("mask|cpu|meta", lambda x: x.softmax(mask=_away(3, 5, dtype=torch.bool))),
}

CASES = cases({DeviceError: _ROWS}, only="torch")
