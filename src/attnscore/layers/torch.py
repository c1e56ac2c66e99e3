"""Attention layers for PyTorch: parameters, training mode and serialisation as ``torch.nn`` has them.

- The mathematics is `attnscore.attend`: these modules hold parameters, check the border and call it.
- ``state_dict`` keys are those of the textbook's layers (``W_q.weight``, ``W_k.weight``, ``w_v.weight``; multi-head
  also ``W_v.weight``, ``W_o.weight``), so its checkpoints load. Sizes not given are inferred at the first call.
- What a mask hides reaches nothing, the gradients of the projections included, NaN and infinity too.
- ``attention_weights`` are computed when read, from detached inputs; nothing is kept under tracing, by pickle or by
  deepcopy.

All are called as ``layer(queries, keys, values, valid_lens=None, mask=None)`` on (batch, length, features).
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor, nn

from attnscore.core.arguments import check_positive
from attnscore.layers import shared
from attnscore.layers.torch_multihead import MultiHeadAttention
from attnscore.layers.torch_parts import Attention, check_inputs, linear, matrix, project
from attnscore.scores import Additive, Bilinear, Dot, Gaussian, ScaledDot

__all__ = [
    "AdditiveAttention",
    "BilinearAttention",
    "DotProductAttention",
    "GaussianAttention",
    "MultiHeadAttention",
]


@final
class DotProductAttention(Attention):
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
        check_inputs(queries, keys, values)
        score = ScaledDot() if self.scaled else Dot()
        return self._pool(queries, keys, values, score=score, valid_lens=valid_lens, mask=mask)

    def extra_repr(self) -> str:
        return self._settings(scaled=None if self.scaled else False)


@final
class AdditiveAttention(Attention):
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

    @shared.naming_arguments(shared.D2L_ADDITIVE)
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
        self.W_q = linear("query_size", query_size, num_hiddens, device=device, dtype=dtype)
        self.W_k = linear("key_size", key_size, num_hiddens, device=device, dtype=dtype)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False, device=device, dtype=dtype)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        check_inputs(queries, keys, values)
        query, key = project("queries", self.W_q, queries, "W_q"), project("keys", self.W_k, keys, "W_k")
        score = Additive(self.w_v.weight[0])
        return self._pool(query, key, values, score=score, valid_lens=valid_lens, mask=mask)

    def extra_repr(self) -> str:
        return self._settings()


@final
class BilinearAttention(Attention):
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
        self.W = matrix(query_size, key_size, device, dtype)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        check_inputs(queries, keys, values)
        score = Bilinear(self.W(queries, keys))
        return self._pool(queries, keys, values, score=score, valid_lens=valid_lens, mask=mask)

    def extra_repr(self) -> str:
        return self._settings()


@final
class GaussianAttention(Attention):
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
        self.start = check_positive("bandwidth", bandwidth)
        start = torch.empty((), device=device, dtype=dtype) if learn_bandwidth else None
        self.log_bandwidth = None if start is None else nn.Parameter(start)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a learned bandwidth to what it started with."""
        if self.log_bandwidth is not None:
            nn.init.constant_(self.log_bandwidth, float(math.log(self.start)))

    @property
    def bandwidth(self) -> float | Tensor:
        """The bandwidth as it is now."""
        return self.start if self.log_bandwidth is None else self.log_bandwidth.exp()

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        check_inputs(queries, keys, values)
        score = Gaussian(self.bandwidth)
        return self._pool(queries, keys, values, score=score, valid_lens=valid_lens, mask=mask)

    def extra_repr(self) -> str:
        learned = None if self.log_bandwidth is None else True
        return self._settings(bandwidth=self.start, learn_bandwidth=learned)
