"""Multi-head attention for PyTorch, with any score, and from ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from typing import Any, Self, final

import torch
from torch import Tensor, nn

from attnscore.errors import ArgumentError, message
from attnscore.layers import shared
from attnscore.layers.torch_parts import Attention, check_inputs, linear, project, start


@final
class MultiHeadAttention(Attention):
    """Project queries, keys and values, attend in each head, join the heads, project: W_o concat_h(pool_h).

    The names, the shapes and the order of the heads are the textbook's.

    Parameters
    ----------
    num_hiddens : int
        Features of the result; each head has num_hiddens / num_heads of them.
    num_heads : int
    dropout : number in [0, 1)
        Of the weights, in training.
    bias : bool
        Whether the four projections have one.
    score : {"scaled_dot", "dot", "gaussian", "cosine", "additive", "bilinear"}
        With one set of parameters per head: ``w_v`` (heads, h) of the additive score, whose W_q and W_k are the layer's
        own, ``W`` (heads, dim, dim), ``log_bandwidth`` (heads,), and ``log_scale`` (heads,) of the cosine.
    score_hiddens : int, optional
        h of the additive score; None: num_hiddens / num_heads.
    num_key_value_heads : int, optional
        Fewer heads for keys and values than for queries (grouped or multi-query attention).
    query_size, key_size, value_size : int, optional
        None: inferred at the first call.
    keep_last : bool
        Whether to keep what `attention_weights` is computed from.

    Examples
    --------
    >>> import torch, attnscore as ats
    >>> layer = MultiHeadAttention(num_hiddens=8, num_heads=2, score="additive")
    >>> x = torch.randn(3, 5, 6)
    >>> layer(x, x, x, valid_lens=[1, 3, 5], mask=ats.Causal()).shape
    torch.Size([3, 5, 8])
    >>> layer.attention_weights.shape
    torch.Size([3, 2, 5, 5])
    """

    @shared.naming_arguments(shared.D2L_MULTI_HEAD)
    def __init__(
        self,
        num_hiddens: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        bias: bool = False,
        score: str = "scaled_dot",
        score_hiddens: int | None = None,
        num_key_value_heads: int | None = None,
        query_size: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        keep_last: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dropout, keep_last)
        heads = shared.Heads.checked(num_hiddens, num_heads, num_key_value_heads, score, score_hiddens)
        kv, make = heads.key_value_count, {"bias": bias, "device": device, "dtype": dtype}
        self.num_hiddens, self.num_heads, self._heads = num_hiddens, num_heads, heads
        self.W_q = linear("query_size", query_size, heads.count * heads.score_width, **make)
        self.W_k = linear("key_size", key_size, kv * heads.score_width, **make)
        self.W_v = linear("value_size", value_size, kv * heads.width, **make)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, **make)
        for name, parameter in heads.parameters().items():
            self.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, device=device, dtype=dtype)))
        self._start_score()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for layer in (self.W_q, self.W_k, self.W_v, self.W_o):
            layer.reset_parameters()
        self._start_score()

    def _start_score(self) -> None:
        for name, parameter in self._heads.parameters().items():
            start(self.get_parameter(name), parameter)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, mask: Any = None
    ) -> Tensor:
        check_inputs(queries, keys, values)
        heads, kv = self._heads, self._heads.key_value_count
        out = self._pool(
            shared.split_heads(project("queries", self.W_q, queries, "W_q"), heads.count, heads.score_width),
            shared.split_heads(project("keys", self.W_k, keys, "W_k"), kv, heads.score_width),
            shared.split_heads(project("values", self.W_v, values, "W_v"), kv, heads.width),
            score=heads.make_score({name: getattr(self, name) for name in heads.parameters()}),
            valid_lens=valid_lens,
            mask=shared.over_heads(mask, shared.scores_shape(queries, keys, values)),
            head_axis=-2,
        )
        joined: Tensor = self.W_o(out.flatten(-2))
        return joined

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, keep_last: bool = True) -> Self:
        """A layer with the numbers of an ``nn.MultiheadAttention``, copied, and its mode, dtype and device.

        The layer takes (batch, length, features), whatever ``module.batch_first`` is. What the module calls
        ``key_padding_mask=p`` is ``mask=KeyPadding.from_ignore(p)``, and its boolean ``attn_mask=a`` is ``mask=~a``.

        Parameters
        ----------
        module : nn.MultiheadAttention
        keep_last : bool

        Raises
        ------
        ArgumentError
            Something else, or a module with ``add_bias_kv`` or ``add_zero_attn``, which have no counterpart.

        Examples
        --------
        >>> import torch
        >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(3, 5, 8)
        >>> torch.allclose(ours(x, x, x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise ArgumentError(message("module", "a torch.nn.MultiheadAttention", type(module).__name__))
        for name, given in (
            ("add_bias_kv", module.bias_k is not None or module.bias_v is not None),
            ("add_zero_attn", module.add_zero_attn),
        ):
            if given:
                raise ArgumentError(message("module", f"one with {name}=False", f"{name}=True"))
        numbers = _numbers(module)
        some = numbers["W_o.weight"]
        # On "meta" nothing is allocated or drawn, and the caller's random stream stays where it was.
        layer = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            bias="W_o.bias" in numbers,
            query_size=module.embed_dim,
            key_size=module.kdim,
            value_size=module.vdim,
            keep_last=keep_last,
            device="meta",
            dtype=some.dtype,
        )
        copies = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in numbers.items()}
        layer.load_state_dict(copies, assign=True)
        for name, x in numbers.items():
            layer.get_parameter(name).requires_grad_(x.requires_grad)
        return layer.train(module.training)

    def extra_repr(self) -> str:
        heads = self._heads
        return self._settings(
            num_hiddens=self.num_hiddens,
            num_heads=self.num_heads,
            score=heads.score,
            score_hiddens=heads.score_width if heads.score_width != heads.width else None,
            num_key_value_heads=heads.key_value_count if heads.key_value_count != heads.count else None,
        )


def _numbers(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """The parameters of an ``nn.MultiheadAttention`` under our names."""
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)
    found = {f"{name}.weight": x for name, x in zip(("W_q", "W_k", "W_v"), weights, strict=True)}
    found["W_o.weight"] = module.out_proj.weight
    if module.in_proj_bias is not None:
        biases = zip(("W_q", "W_k", "W_v"), module.in_proj_bias.chunk(3), strict=True)
        found |= {f"{name}.bias": x for name, x in biases}
        found["W_o.bias"] = module.out_proj.bias
    return found
