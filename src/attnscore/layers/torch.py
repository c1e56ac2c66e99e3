"""Attention layers for PyTorch: parameters, training mode and serialisation as ``torch.nn`` has them.

- The mathematics is `attnscore.attend`: these modules hold parameters, check the border and call it.
- ``state_dict`` keys are those of the textbook's layers (``W_q.weight``, ``W_k.weight``, ``w_v.weight``; multi-head also
  ``W_v.weight``, ``W_o.weight``), so its checkpoints load. Sizes that are not given are inferred at the first call.
- What a mask hides reaches nothing, the gradients of the projections included, NaN and infinity too.
- ``attention_weights`` are computed when read, from detached inputs: no graph is kept alive, and nothing is kept under
  tracing, by pickle or by deepcopy.
"""

from __future__ import annotations

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from attnscore import frameworks
from attnscore.api import attend
from attnscore.blocks import attention_weights
from attnscore.errors import ArgumentError, DeviceError, DtypeError, FrameworkError, message
from attnscore.layers import shared
from attnscore.scoring import Additive, Bilinear, Dot, Gaussian, ScaledDot, arrays_of
from attnscore.scoring.contract import quarantined

__all__ = [
    "AdditiveAttention",
    "BilinearAttention",
    "DotProductAttention",
    "GaussianAttention",
    "MultiHeadAttention",
]

_OPS = frameworks.load("torch")


class _Attention(nn.Module):
    """What every layer has: dropout in training, and the inputs of its last softmax."""

    def __init__(self, dropout: float, keep_last: bool) -> None:
        super().__init__()
        self.dropout = shared.check_probability(dropout)
        self.keep_last = keep_last
        self._last: _Call | str | None = None

    @abstractmethod
    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        """Attention pooling.

        Parameters
        ----------
        queries : (batch, query, features)
        keys : (batch, key, features)
        values : (batch, key, features)
        valid_lens : (batch,) or (batch, query) whole numbers, optional
        mask : a mask object, or a boolean array broadcastable to (batch, query, key), True = may attend; optional

        Returns
        -------
        out : (batch, query, features of the values, or num_hiddens)

        Raises
        ------
        ShapeError, DtypeError, DeviceError, FrameworkError, MaskError
        """

    @property
    def attention_weights(self) -> Tensor:
        """The weights of the last call, before dropout, detached, computed now: (batch, query, key).

        Multi-head: (batch, head, query, key). O(n^2) memory while they are held; the call itself kept its queries and
        keys alone.

        Raises
        ------
        AttnscoreError
            No call has been made, the last one ran inside ``torch.compile`` or ``torch.func``, ``keep_last`` is off, or
            its inputs were changed in place since.
        """
        shared.check_kept(self._last, self.keep_last)
        assert isinstance(self._last, _Call)
        return self._last.weights()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the last call: a checkpoint or a copy carries no activations."""
        return {**self.__dict__, "_last": None}

    def _pool(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        """`attend` in this layer's mode, remembered for `attention_weights`."""
        # Cast here, so that the inputs kept are those that the softmax saw.
        query, key, value = _OPS.autocast(query, key, value)
        out: Tensor = attend(query, key, value, dropout=self.dropout if self.training else 0.0, **arguments)
        if not self.keep_last:
            self._last = None
        elif _is_traced(query, key, *arrays_of(arguments["score"]).values()):
            self._last = "torch.compile, torch.func and tracing, which keep nothing"
        else:
            self._last = _Call.of(query, key, arguments)
        return out

    def _settings(self, **given: Any) -> str:
        """The arguments for ``extra_repr``; those that are None, and defaults, left out."""
        given |= {"dropout": self.dropout or None, "keep_last": None if self.keep_last else False}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)


@dataclass(frozen=True, eq=False)
class _Call:
    """The detached inputs of one softmax."""

    query: Tensor
    key: Tensor
    arguments: dict[str, Any]
    versions: tuple[tuple[Tensor, int], ...]

    @classmethod
    def of(cls, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> _Call:
        """Inputs by reference, with their version; what an optimiser or a decoding loop writes to, copied."""
        query, key, arguments = query.detach(), key.detach(), dict(arguments)
        score, lens = arguments["score"], arguments["valid_lens"]
        arrays = {name: x.detach().clone() for name, x in arrays_of(score).items()}
        arguments["score"] = dataclasses.replace(score, **arrays)
        if lens is not None:
            arguments["valid_lens"] = lens.detach().clone() if isinstance(lens, Tensor) else np.array(lens)
        held = (query, key, *_tensors(arguments["mask"]))
        # Inference tensors count no versions.
        versions = tuple((x, x._version) for x in held if not x.is_inference())
        return cls(query, key, arguments, versions)

    def weights(self) -> Tensor:
        if any(x._version != version for x, version in self.versions):
            hint = "read the weights before writing to the tensors that the layer was called with"
            raise ArgumentError(
                message("attention_weights", "inputs as they were in the call", "changed ones", hint=hint)
            )
        with torch.no_grad(), torch.autocast(self.query.device.type, enabled=False):
            found: Tensor = attention_weights(self.query, self.key, **self.arguments)
        return found


@final
class DotProductAttention(_Attention):
    """Pooling by the (scaled) dot product of queries and keys of one length: softmax(q . k / sqrt(dim)) v.

    Parameters
    ----------
    dropout : number in [0, 1)
        Of the weights, in training.
    scaled : bool
        False leaves the division by sqrt(dim) out.
    keep_last : bool
        Whether to keep what `attention_weights` is computed from.

    Examples
    --------
    >>> import torch
    >>> layer = DotProductAttention(dropout=0.5).eval()
    >>> values = torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    >>> layer(torch.randn(2, 1, 2), torch.ones(2, 10, 2), values, torch.tensor([2, 6]))[:, 0].round()
    tensor([[ 2.,  3.,  4.,  5.],
            [10., 11., 12., 13.]])
    >>> layer.attention_weights.shape
    torch.Size([2, 1, 10])
    """

    def __init__(self, dropout: float = 0.0, *, scaled: bool = True, keep_last: bool = True) -> None:
        super().__init__(dropout, keep_last)
        self.scaled = scaled

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        _check(queries, keys, values)
        score = ScaledDot() if self.scaled else Dot()
        return self._pool(queries, keys, values, score=score, valid_lens=valid_lens, mask=mask)

    def extra_repr(self) -> str:
        return self._settings(scaled=None if self.scaled else False)


@final
class AdditiveAttention(_Attention):
    """Pooling by the additive (Bahdanau) score w_v . tanh(W_q q + W_k k), for queries and keys of different lengths.

    Parameters
    ----------
    num_hiddens : int
        h, the length of w_v.
    dropout : number in [0, 1)
    key_size, query_size : int, optional
        None: inferred at the first call.
    keep_last : bool

    Examples
    --------
    >>> import torch
    >>> layer = AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)
    >>> layer(torch.ones(2, 1, 20), torch.ones(2, 10, 2), torch.ones(2, 10, 4), torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    """

    def __init__(
        self,
        num_hiddens: int,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        query_size: int | None = None,
        keep_last: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dropout, keep_last)
        shared.check_size("num_hiddens", num_hiddens)
        self.num_hiddens = num_hiddens
        self.W_q = _linear("query_size", query_size, num_hiddens, device=device, dtype=dtype)
        self.W_k = _linear("key_size", key_size, num_hiddens, device=device, dtype=dtype)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False, device=device, dtype=dtype)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        _check(queries, keys, values)
        query, key = _project("queries", self.W_q, queries), _project("keys", self.W_k, keys)
        score = Additive(self.w_v.weight[0])
        return self._pool(query, key, values, score=score, valid_lens=valid_lens, mask=mask)

    def extra_repr(self) -> str:
        return self._settings()


@final
class BilinearAttention(_Attention):
    """Pooling by the bilinear (Luong's "general") score q . W k, for queries and keys of different lengths.

    Parameters
    ----------
    dropout : number in [0, 1)
    key_size, query_size : int, optional
        None: inferred at the first call. ``W.weight`` is (query_size, key_size).
    keep_last : bool

    Examples
    --------
    >>> import torch
    >>> layer = BilinearAttention()
    >>> layer(torch.ones(2, 1, 20), torch.ones(2, 10, 2), torch.ones(2, 10, 4)).shape
    torch.Size([2, 1, 4])
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        query_size: int | None = None,
        keep_last: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dropout, keep_last)
        shared.check_size("query_size", query_size, optional=True)
        shared.check_size("key_size", key_size, optional=True)
        kind = _Matrix if query_size and key_size else _LazyMatrix
        with _without_lazy_warning():
            self.W = kind(query_size or 0, key_size or 0, device=device, dtype=dtype)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        _check(queries, keys, values)
        weight = self.W(queries, keys)
        for axis, (name, x) in enumerate((("queries", queries), ("keys", keys))):
            _check_operand(name, x, weight, "W.weight", axis)
        score = Bilinear(weight)
        return self._pool(queries, keys, values, score=score, valid_lens=valid_lens, mask=mask)

    def extra_repr(self) -> str:
        return self._settings()


@final
class GaussianAttention(_Attention):
    """Pooling by the Gaussian kernel -|q - k|^2 / (2 bandwidth^2): Nadaraya-Watson regression.

    Parameters
    ----------
    bandwidth : number above 0
        In the units of queries and keys.
    dropout : number in [0, 1)
    learn_bandwidth : bool
        Make it a parameter, that starts at `bandwidth`. It is learned as its logarithm, so that it stays above 0.
    keep_last : bool

    Examples
    --------
    >>> import torch
    >>> layer = GaussianAttention(bandwidth=0.5, learn_bandwidth=True)
    >>> layer(torch.zeros(1, 1, 1), torch.zeros(1, 3, 1), torch.arange(3.0).reshape(1, 3, 1)).item()
    1.0
    >>> [name for name, _ in layer.named_parameters()]
    ['log_bandwidth']
    """

    def __init__(
        self,
        bandwidth: float = 1.0,
        dropout: float = 0.0,
        *,
        learn_bandwidth: bool = False,
        keep_last: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dropout, keep_last)
        self.start = shared.check_bandwidth(bandwidth)
        start = torch.empty((), device=device, dtype=dtype) if learn_bandwidth else None
        self.log_bandwidth = None if start is None else nn.Parameter(start)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a learned bandwidth to what it started with."""
        if self.log_bandwidth is not None:
            nn.init.constant_(self.log_bandwidth, float(np.log(self.start)))

    @property
    def bandwidth(self) -> float | Tensor:
        """The bandwidth as it is now."""
        return self.start if self.log_bandwidth is None else self.log_bandwidth.exp()

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        _check(queries, keys, values)
        score = Gaussian(self.bandwidth)
        return self._pool(queries, keys, values, score=score, valid_lens=valid_lens, mask=mask)

    def extra_repr(self) -> str:
        learned = None if self.log_bandwidth is None else True
        return self._settings(bandwidth=self.start, learn_bandwidth=learned)
