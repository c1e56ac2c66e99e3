"""Attention layers for PyTorch: parameters, training mode and serialisation as ``torch.nn`` has them.

- All are called as ``layer(queries, keys, values, valid_lens=None, mask=None)`` on (batch, length, features);
  `attnscore.layers` has the rules of all frameworks.
- ``state_dict`` keys match Dive into Deep Learning (``W_q.weight``, ``w_v.weight``), so its checkpoints load.
- Nothing is kept of a call under tracing, by pickle or by deepcopy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Never, Self, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from attnscore import backends
from attnscore.backends import torch as backend
from attnscore.backends import torch_private as private
from attnscore.base.arguments import hides_unknown, reject_unknown, shown
from attnscore.base.cache import BoundedCache
from attnscore.errors import ArgumentError, DeviceError, DtypeError, message
from attnscore.kv_cache import KeyValueCache
from attnscore.layers import base, description, shared
from attnscore.layers.base import BaseAttention, PreparesKeys
from attnscore.layers.description import Layer, Linear, Parameter
from attnscore.layers.documentation import Documentation, documented_call
from attnscore.parallel.shard import Shard
from attnscore.plans.padding import may_save_time, project_rows, real_rows
from attnscore.scores.base import with_nonfinite_rows_isolated

__all__ = ["AdditiveAttention", "BilinearAttention", "DotProductAttention", "GaussianAttention", "MultiHeadAttention"]

_OPS = backends.load("torch")
_documented = Documentation(
    "from torch import ones",
    options="""
device, dtype : optional
    Device and dtype of the parameters.
""",
)


# ------------------------------------------------------------------ parameters


def _is_bare(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module only runs its kind's forward: no hook or parametrisation sees it."""
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not private.has_any_global_hook()
        and module._parameters.get("weight") is not None
    )


def _start(x: Tensor, parameter: Parameter) -> None:
    """Give a parameter its starting values."""
    if parameter.bound:
        nn.init.uniform_(x, -parameter.bound, parameter.bound)
    elif isinstance(parameter.start, tuple):
        with torch.no_grad():
            x.copy_(torch.tensor(parameter.start, dtype=torch.float64))
    else:  # filled, which a parameter sharded over ranks takes too
        nn.init.constant_(x, parameter.start)


class Matrix(nn.Module):
    """A weight (query_size, key_size), the W of a bilinear score."""

    def __init__(self, parameter: Parameter, *, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._parameter = parameter
        self.weight = nn.Parameter(torch.empty(parameter.sizes, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, if there is one."""
        if not isinstance(self.weight, UninitializedParameter):
            _start(self.weight, self._parameter.sized(self.weight.shape))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        weight: Tensor = self.weight
        _check_operands(self._parameter, weight, {"queries": queries, "keys": keys})
        return weight

    def extra_repr(self) -> str:
        if isinstance(self.weight, UninitializedParameter):
            return ""
        return f"query_size={self.weight.shape[0]}, key_size={self.weight.shape[1]}"


class LazyLinear(nn.LazyLinear):
    """torch's own, whose weight can be trained after a first call in inference mode too."""

    def initialize_parameters(self, input: Tensor) -> None:
        with torch.inference_mode(False):
            super().initialize_parameters(input)


class _LazyMatrix(LazyModuleMixin, Matrix):
    """A `Matrix` that takes the sizes it lacks from its first call, and then becomes one."""

    cls_to_become = Matrix

    def __init__(self, parameter: Parameter, *, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__(parameter, device=device, dtype=dtype)
        # torch types neither these arguments nor that this is a Parameter.
        self.weight = UninitializedParameter(device=device, dtype=dtype)  # type: ignore[call-arg, assignment]

    def initialize_parameters(self, queries: Tensor, keys: Tensor) -> None:
        if isinstance(self.weight, UninitializedParameter):
            sizes = zip(self._parameter.shape, (queries, keys), strict=True)
            with torch.inference_mode(False):
                self.weight.materialize(tuple(size or x.shape[-1] for size, x in sizes))
                self.reset_parameters()


def _check_operands(part: Linear | Parameter, weight: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Raise unless the features of inputs fit the last axes of a part's weight, and dtype and device fit too."""
    owner = part.name if isinstance(part, Linear) else part.torch_names[0]
    for place, name in enumerate(part.inputs):
        x = inputs[name]
        if not isinstance(weight, UninitializedParameter):
            shared.check_features(name, x.shape[-1], weight.shape[place - len(part.inputs)], owner)
        if x.device != weight.device:
            raise DeviceError(message(name, f"a tensor on {weight.device}, where {owner} is", x.device))
        if x.dtype == weight.dtype or not weight.is_floating_point():
            continue
        if not _OPS.has_autocast(x) or torch.float64 in (x.dtype, weight.dtype):
            hint = "layer.to(x.dtype) and x.to(layer's dtype) both help"
            raise DtypeError(message(name, f"{weight.dtype}, the dtype of {owner}", x.dtype, hint=hint))


# ------------------------------------------------------------------ the call


class LastCall(base.LastCall):
    """Tensors are kept by reference, with their version."""

    def detached(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return self.copied(x)
        return x.detach() if x.requires_grad else x


def is_traced(*arrays: Any) -> bool:
    """Whether the tensors among these stand for values of a later run, or for many values at once."""
    if torch.compiler.is_compiling() or private.tracing_state() is not None:
        return True
    return any(isinstance(x, Tensor) and x.device.type != "meta" and backend.is_traced(x) for x in arrays)


# nn.Module comes first: FSDP2 sets the __class__ of a layer to a subclass, which Python allows where the instances of
# both have their __dict__ from a direct child of `object`.
class Attention(nn.Module, BaseAttention[Tensor]):
    """Base of the layers: their parameters, dropout in training, and the inputs of the last softmax."""

    _ops, _last_call_type, _is_traced = _OPS, LastCall, staticmethod(is_traced)
    _calls_not_kept = "torch.compile, torch.func and tracing, which keep nothing"
    _modules: dict[str, Any]

    def __init__(
        self,
        layer: Layer,
        dropout: float,
        keep_last: bool,
        *,
        context_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_options(layer, dropout, keep_last)
        if layer.heads:
            self.context_group = context_group
        on = {"device": device, "dtype": dtype}
        for linear in layer.linears:
            sizes = (linear.units,) if linear.size is None else (linear.size, linear.units)
            kind: Any = LazyLinear if linear.size is None else nn.Linear
            self.add_module(linear.name, kind(*sizes, bias=linear.bias, **on))
        for parameter in layer.parameters:
            if parameter.inputs:
                kind = _LazyMatrix if None in parameter.shape else Matrix
                self.add_module(parameter.name, kind(parameter, **on))
            else:
                self.register_parameter(parameter.name, nn.Parameter(torch.empty(parameter.sizes, **on)))
                _start(self.get_parameter(parameter.name), parameter)

    def reset_parameters(self) -> None:
        """Draw all parameters anew; those that start constant are set to their start."""
        for part in self._layer.parts:
            if isinstance(module := getattr(self, part.name), nn.Module):
                module.reset_parameters()  # type: ignore[operator]  # each has parameters
            elif isinstance(part, Parameter):
                _start(self.get_parameter(part.name), part)

    @documented_call()
    @hides_unknown
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Any = None,
        mask: Any = None,
        *,
        bias: Tensor | None = None,
        cache: KeyValueCache | None = None,
        **unknown: Never,
    ) -> Tensor:
        reject_unknown(self.forward, unknown)
        keys, linears = self._unprepared(keys)
        inputs = {"queries": queries, "keys": keys, "values": values}
        may_unpad = self._checked_once(inputs, linears)
        is_plain = may_unpad is not None
        if not is_plain:
            self._check(inputs, linears)
        lens = valid_lens if may_unpad and cache is None else None
        operands, arguments = self._operands(inputs, linears, valid_lens, mask, bias, cache, lens=lens)
        if not is_plain:
            operands = _autocast(operands)
        dropout = self.dropout if self.training else 0.0
        return self._attend(operands, arguments, dropout, is_concrete=is_plain)[0]

    def _check(self, inputs: dict[str, Any], linears: tuple[Linear, ...]) -> None:
        """Raise unless the inputs fit each other and the weights that are applied to them."""
        shared.check_inputs(_OPS, inputs, Tensor, expected="a torch.Tensor", hint="torch.as_tensor(x) makes one")
        parts: tuple[Linear | Parameter, ...] = (*linears, *self._layer.parameters)
        for part in parts:
            if part.inputs and (weight := self._weight(part)) is not None:
                _check_operands(part, weight, inputs)

    def _checked_once(self, inputs: dict[str, Any], linears: tuple[Linear, ...]) -> bool | None:
        """Check inputs whose layouts are new to such a layer; return whether leaving padded keys out may save time.

        None, and no check, unless the inputs and the weights that project them are all plain tensors.
        """
        if torch.compiler.is_compiling():
            # The trace would read the missing weights of a lazy module, and specialise on them.
            return None
        layer, arrays = self._layer, [*inputs.values()]
        for name in layer.on_inputs:
            if (weight := self._modules[name]._parameters.get("weight")) is not None:
                arrays.append(weight)
        signature = _OPS.signature(arrays)
        if signature is None or private.tracing_state() is not None or private.are_transforms_active():
            return None

        def check() -> bool:
            self._check(inputs, linears)
            padded = [x for x in linears if x.input in ("keys", "values")]
            return any(may_save_time(_OPS, inputs[x.input], x.units) for x in padded)

        return _CHECKED.get_or_compute((layer.score, layer.options, len(linears), signature), check)

    def _weight(self, part: Linear | Parameter) -> Tensor | None:
        """Return the weight of a part; None where it is packed, of another module, or without sizes in a compiler."""
        module = self._modules[part.name]
        # A lazy module gets its weight when it is first called. A compiler then starts its trace anew, and fails where
        # the second trace differs from the first.
        is_unsized = torch.compiler.is_compiling() and None in part.shape
        if is_unsized or not isinstance(module, (nn.Linear, Matrix)):
            return None
        # Not the attribute: a parametrisation (spectral norm) would compute it, and count a step, once more.
        weight = module._parameters.get("weight")
        if not isinstance(weight, Tensor):
            return None
        # Packed weights have other shapes; a lazy module may have loaded its weight, and has no shape before.
        is_packed = isinstance(module, nn.Linear) and 0 != module.in_features != weight.shape[-1]
        return None if is_packed else weight

    def _project(self, linear: Linear, x: Tensor) -> Any:
        return with_nonfinite_rows_isolated(_OPS, x, self._modules[linear.name])

    def _project_unpadded(self, linear: Linear, x: Tensor, lens: Any) -> Any:
        module, rows = self._modules[linear.name], None
        is_on_host = (type(lens) is Tensor and lens.is_cpu) or type(lens) is np.ndarray
        if is_on_host and may_save_time(_OPS, x, linear.units) and _is_bare(module, nn.Linear):
            rows = real_rows(_OPS, x, lens, linear.units)
        if rows is None:
            return self._project(linear, x)
        return project_rows(_OPS, x, rows, lambda x: with_nonfinite_rows_isolated(_OPS, x, module))

    def _read(self, part: Linear | Parameter, inputs: Mapping[str, Tensor]) -> Any:
        if isinstance(part, Parameter) and not part.inputs:
            return getattr(self, part.name)
        module, weight = self._modules[part.name], None
        # Not in a compiler, as in `_checked_once`.
        if not torch.compiler.is_compiling() and _is_bare(module, nn.Linear if isinstance(part, Linear) else Matrix):
            weight = module._parameters["weight"]
        if isinstance(part, Linear):
            # A view: an index takes twice as long, and its gradient five times.
            return self._vector(part, inputs["queries"]) if weight is None else weight.reshape(-1)
        return module(*map(inputs.__getitem__, part.inputs)) if weight is None else weight

    def __dir__(self) -> list[str]:
        """List attributes without ``attention_weights``: torch.jit reads all of them, which would compute it."""
        return [name for name in super().__dir__() if name != "attention_weights"]  # type: ignore[no-untyped-call]  # untyped in torch

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the last call: a checkpoint or a copy carries no activations."""
        return {**self.__dict__, "_last": None}

    def extra_repr(self) -> str:
        options = {name: value for name, value in self._layer.options if name not in self._layer.hidden}
        options |= {"dropout": self.dropout or None, "keep_last": None if self.keep_last else False}
        return ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)


def _autocast(operands: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands as `attend` would cast them: a layer has to keep the softmax's inputs."""
    if not _OPS.has_autocast(operands[0]):
        return operands
    with _OPS.numeric_scope():
        return _OPS.autocast(*operands)


_CHECKED: BoundedCache[bool] = BoundedCache(256)


# ------------------------------------------------------------------ the layers


@final
@_documented(without=("context_group", "device", "dtype"))
class DotProductAttention(description.DotProductLayer, Attention):
    """Pooling by the dot product of queries and keys, softmax(q . k / sqrt(dim)) v."""


@final
@_documented(without=("context_group",))
class AdditiveAttention(description.AdditiveLayer, Attention, PreparesKeys[Tensor]):
    """Pooling by the additive score w_v . tanh(W_q q + W_k k)."""

    W_q: nn.Linear
    W_k: nn.Linear
    w_v: nn.Linear

    def _checked_keys(self, keys: Tensor, linear: Linear) -> Tensor:
        self._check({"keys": keys, "values": keys}, (linear,))
        return keys


@final
@_documented(without=("context_group",))
class BilinearAttention(description.BilinearLayer, Attention):
    """Pooling by the bilinear score q . W k."""

    W: Matrix


@final
@_documented(without=("context_group",))
class GaussianAttention(description.GaussianLayer, Attention):
    """Pooling by the Gaussian kernel -|q - k|^2 / (2 bandwidth^2)."""

    log_bandwidth: nn.Parameter | None


@final
@_documented()
class MultiHeadAttention(description.MultiHeadLayer, Attention):
    """Pooling in several heads, W_o concat_h(pool_h)."""

    W_q: nn.Linear
    W_k: nn.Linear
    W_v: nn.Linear
    W_o: nn.Linear

    @documented_call("""
shards : Shard of each rank, optional
    With ``context_group=``: the positions that the ranks hold, of queries and keys alike. None: consecutive parts.
""")
    @hides_unknown
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Any = None,
        mask: Any = None,
        *,
        bias: Tensor | None = None,
        cache: KeyValueCache | None = None,
        shards: Sequence[Shard] | None = None,
        **unknown: Never,
    ) -> Tensor:
        reject_unknown(self.forward, unknown)
        if self.context_group is None:
            if shards is not None:
                raise ArgumentError(message("shards", "none without a context_group", shown(shards)))
            return Attention.forward(self, queries, keys, values, valid_lens, mask, bias=bias, cache=cache)
        if cache is not None:
            raise ArgumentError(message("cache", "none with a context_group", "a cache", hint="merge_over() decodes"))
        if self.rotary is not None and shards is None:
            raise ArgumentError(message("shards", "those of all ranks, for the positions of rotary=", None))
        keys, linears = self._unprepared(keys)
        inputs = {"queries": queries, "keys": keys, "values": values}
        self._check(inputs, linears)
        return self._pooled_over_ranks(inputs, valid_lens, mask, bias, shards)

    def _pooled_over_ranks(
        self, inputs: dict[str, Tensor], valid_lens: Any, mask: Any, bias: Tensor | None, shards: Sequence[Shard] | None
    ) -> Tensor:
        """Return the output at this rank's positions, whose queries also attend keys of the other ranks."""
        # Imported here: most layers do not need it, and it imports torch's DTensor.
        from attnscore.parallel.torch import attend as attend_over_ranks

        queries, group, positions = inputs["queries"], self.context_group, None
        if shards is not None:
            # The group itself of a mesh of one axis.
            rank = torch.distributed.get_rank(group.get_group() if hasattr(group, "get_group") else group)
            positions = shards[rank].positions(queries)[None]
        # The mask of the whole sequence does not fit these shapes, and is checked with the lengths of the whole.
        operands, arguments = self._operands(inputs, self._layer.linears, valid_lens, None, bias, positions=positions)
        arguments["mask"] = shared.over_heads(mask, (len(queries), None, None))
        dropout = self.dropout if self.training else 0.0
        out = attend_over_ranks(
            *_autocast(operands), group=group, queries=shards, sum_parameters=False, dropout=dropout, **arguments
        )
        object.__setattr__(self, "_last", "a context group, whose ranks have some of the keys each")
        return self._output(out)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy all but the group of processes, which the copy shares."""
        memo[id(self.context_group)] = self.context_group
        copied: Self = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]  # torch's own
        return copied

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, keep_last: bool = True) -> Self:
        """Return a layer with copies of the parameters of an ``nn.MultiheadAttention``, its mode, dtype and device.

        The layer takes (batch, length, features), whatever ``module.batch_first`` is. The module's
        ``key_padding_mask=p`` is ``mask=KeyPadding.from_ignore(p)``, and its boolean ``attn_mask=a`` is ``mask=~a``, of
        three axes ``mask=~a.unflatten(0, (batch, heads))``.

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
        for name, is_on in (
            ("add_bias_kv", module.bias_k is not None or module.bias_v is not None),
            ("add_zero_attn", module.add_zero_attn),
        ):
            if is_on:
                raise ArgumentError(message("module", f"one with {name}=False", f"{name}=True"))
        parameters = _parameters_of(module)
        output_weight = parameters["W_o.weight"]
        # On "meta" nothing is allocated or drawn, and the caller's random stream stays where it was.
        layer = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            bias="W_o.bias" in parameters,
            query_size=module.embed_dim,
            key_size=module.kdim,
            value_size=module.vdim,
            keep_last=keep_last,
            device="meta",
            dtype=output_weight.dtype,
        )
        copies = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in parameters.items()}
        layer.load_state_dict(copies, assign=True)
        for name, x in parameters.items():
            layer.get_parameter(name).requires_grad_(x.requires_grad)
        return layer.train(module.training)


def _parameters_of(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Return the parameters of an ``nn.MultiheadAttention`` under the names of this layer."""
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)
    parameters = {f"{name}.weight": x for name, x in zip(("W_q", "W_k", "W_v"), weights, strict=True)}
    parameters["W_o.weight"] = module.out_proj.weight
    if module.in_proj_bias is not None:
        biases = zip(("W_q", "W_k", "W_v"), module.in_proj_bias.chunk(3), strict=True)
        parameters |= {f"{name}.bias": x for name, x in biases}
        parameters["W_o.bias"] = module.out_proj.bias
    return parameters
