"""What the PyTorch layers are made of: the last call, lazily sized weights, projections, checks at the border.

- A call is kept as detached inputs of its softmax: it holds no graph, no layer, and O(n) memory.
- Rows that hold a NaN or infinity pass a projection without reaching the gradient of its weight, so that what a mask
  hides afterwards reaches nothing.
- A wrong shape, dtype or device is named before PyTorch meets it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from attnscore import backends
from attnscore.analysis.weights import attention_weights
from attnscore.api import attend
from attnscore.errors import ArgumentError, DeviceError, DtypeError, message
from attnscore.layers import shared
from attnscore.masks import Mask
from attnscore.scores import arrays_of
from attnscore.scores.base import with_nonfinite_rows_isolated

_OPS = backends.load("torch")


class Attention(nn.Module):
    """What every layer has: dropout in training, and the inputs of its last softmax."""

    def __init__(self, dropout: float, keep_last: bool) -> None:
        super().__init__()
        self.dropout = shared.check_probability(dropout)
        self.keep_last = keep_last
        self._last: Call | str | None = None

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
        return shared.last_call(self._last, self.keep_last).weights()

    def __dir__(self) -> list[str]:
        """Without ``attention_weights``: torch.jit reads all that stands here, and would have them computed."""
        return [name for name in super().__dir__() if name != "attention_weights"]  # type: ignore[no-untyped-call]  # torch's own

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the last call: a checkpoint or a copy carries no activations."""
        return {**self.__dict__, "_last": None}

    def _pool(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        """`attend` in this layer's mode, remembered for `attention_weights`."""
        if torch.is_autocast_enabled(query.device.type):
            # `attend` would cast as well, but the inputs kept must be those that the softmax saw.
            with _OPS.numeric_scope():
                query, key, value = _OPS.autocast(query, key, value)
        out: Tensor = attend(query, key, value, dropout=self.dropout if self.training else 0.0, **arguments)
        others = (*arrays_of(arguments["score"]).values(), arguments["mask"], arguments["valid_lens"])
        if not self.keep_last:
            self._last = None
        elif is_traced(query, key, *others):
            self._last = "torch.compile, torch.func and tracing, which keep nothing"
        else:
            self._last = Call.of(query, key, arguments)
        return out

    def _settings(self, **given: Any) -> str:
        """The arguments for ``extra_repr``; those that are None, and defaults, left out."""
        given |= {"dropout": self.dropout or None, "keep_last": None if self.keep_last else False}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)


@dataclass(frozen=True, eq=False)
class Call:
    """The detached inputs of one softmax."""

    query: Tensor
    key: Tensor
    arguments: dict[str, Any]
    versions: tuple[tuple[Tensor, int], ...]

    @classmethod
    def of(cls, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> Call:
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


def linear(
    name: str,
    size: int | None,
    out_features: int,
    *,
    bias: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear:
    """A projection of vectors of length `size`, or of whatever length comes first when that is None."""
    shared.check_size(name, size, optional=True)
    if size is not None:
        return nn.Linear(size, out_features, bias=bias, device=device, dtype=dtype)
    with _without_lazy_warning():
        return nn.LazyLinear(out_features, bias=bias, device=device, dtype=dtype)


def matrix(query_size: int | None, key_size: int | None, device: Any, dtype: torch.dtype | None) -> Matrix:
    """The matrix of a bilinear score; sizes that are None are those of the first queries and keys."""
    shared.check_size("query_size", query_size, optional=True)
    shared.check_size("key_size", key_size, optional=True)
    with _without_lazy_warning():
        kind = Matrix if query_size and key_size else _LazyMatrix
        return kind(query_size or 0, key_size or 0, device=device, dtype=dtype)


class Matrix(nn.Module):
    """A weight (query_size, key_size) that is used as it is."""

    def __init__(self, query_size: int, key_size: int, *, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(query_size, key_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        start(self.weight, shared.bilinear_parameter(*self.weight.shape))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        weight = self.weight
        check_operand("queries", queries, weight, "W.weight", axis=0)
        check_operand("keys", keys, weight, "W.weight", axis=1)
        return weight

    def extra_repr(self) -> str:
        return (
            ""
            if isinstance(self.weight, UninitializedParameter)
            else f"query_size={self.weight.shape[0]}, key_size={self.weight.shape[1]}"
        )


class _LazyMatrix(LazyModuleMixin, Matrix):
    """A `Matrix` that takes the sizes it lacks from its first call, and then becomes one."""

    cls_to_become = Matrix

    def __init__(self, query_size: int, key_size: int, *, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__(0, 0, device=device, dtype=dtype)
        self._given = query_size, key_size
        # torch types neither these arguments nor that this is a Parameter.
        self.weight = UninitializedParameter(device=device, dtype=dtype)  # type: ignore[call-arg, assignment]

    def reset_parameters(self) -> None:
        if not isinstance(self.weight, UninitializedParameter):
            super().reset_parameters()

    def initialize_parameters(self, queries: Tensor, keys: Tensor) -> None:
        if isinstance(self.weight, UninitializedParameter):
            sizes = (given or x.shape[-1] for given, x in zip(self._given, (queries, keys), strict=True))
            self.weight.materialize(tuple(sizes))
            self.reset_parameters()


@contextlib.contextmanager
def _without_lazy_warning() -> Iterator[None]:
    """Older releases of PyTorch warn that lazy modules are new; the caller did not choose them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Lazy modules are a new feature")
        yield


def start(x: Tensor, parameter: shared.Parameter) -> None:
    """Give a parameter its starting values."""
    if parameter.bound:
        nn.init.uniform_(x, -parameter.bound, parameter.bound)
    else:
        nn.init.constant_(x, parameter.start)


def project(name: str, layer: nn.Linear, x: Tensor, owner: str) -> Tensor:
    """``layer(x)``, with the rows of `x` that hold a NaN or infinity set apart.

    The module itself is called, so that hooks, parametrisations and whatever replaced it (adapters, quantised weights)
    have their say.
    """
    # Not the attribute: a parametrisation (spectral norm) would compute it, and count a step, once more.
    weight = layer._parameters.get("weight")
    if isinstance(weight, Tensor) and not isinstance(weight, UninitializedParameter):
        check_operand(name, x, weight, owner, axis=1)
    return with_nonfinite_rows_isolated(_OPS, x, layer)  # type: ignore[no-any-return]  # arrays of the core are Any


def check_inputs(queries: Any, keys: Any, values: Any) -> None:
    """Raise unless the inputs are floating tensors (batch, length, features) that belong together."""
    inputs = {"queries": queries, "keys": keys, "values": values}
    shared.check_inputs(_OPS, inputs, Tensor, wanted="a torch.Tensor", hint="torch.as_tensor(x) makes one")


def check_operand(name: str, x: Tensor, weight: Tensor, owner: str, *, axis: int) -> None:
    """Raise unless the vectors of `x` fit axis `axis` of a weight, in dtype and device too."""
    shared.check_features(name, x.shape[-1], weight.shape[axis], owner)
    if x.device != weight.device:
        raise DeviceError(message(name, f"a tensor on {weight.device}, where {owner} is", x.device))
    cast = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)
    if x.dtype != weight.dtype and weight.is_floating_point() and not cast:
        hint = "layer.to(x.dtype) and x.to(layer's dtype) both help"
        raise DtypeError(message(name, f"{weight.dtype}, the dtype of {owner}", x.dtype, hint=hint))


def _tensors(x: Any) -> list[Tensor]:
    """The tensors in a mask, or a tensor itself."""
    arrays = x.arrays().values() if isinstance(x, Mask) else [x]
    return [x for x in arrays if isinstance(x, Tensor)]


def is_traced(*arguments: Any) -> bool:
    """Whether the tensors in these stand for values of some later run, or for many values at once."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or any(
            torch._C._functorch.is_functorch_wrapped_tensor(x) or isinstance(x, torch._subclasses.FakeTensor)
            for argument in arguments
            for x in _tensors(argument)
        )
    )
