"""Weights of single attention heads: QK-clip, and heads that are drawn anew.

Requirements:
- the same functions serve PyTorch, Flax (NNX and linen) and Keras, and leave the other heads' weights as they are;
- projections are found by their usual names; where there are none, the error lists layers and a line to write;
- an error leaves all weights as they are;
- heads whose score does not scale with the weights of queries and keys are an error that says what to change.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from attnscore.base.arguments import check_choice, check_count, check_positive, is_whole, shown
from attnscore.diagnostics.watching.base import WHOLE
from attnscore.diagnostics.watching.health import logit_size
from attnscore.diagnostics.watching.records import Records, Row
from attnscore.diagnostics.watching.watch import framework_of
from attnscore.errors import ArgumentError, message

Heads = Mapping[str, Sequence[int]]

PROJECTIONS = ("query", "key", "value")
# Three layers that make queries, keys and values; then one that makes the queries of all heads, then the keys, then the
# values. Other names, such as "query_key_value", stand for other orders.
_LAYERS = [tuple(pattern.format(name[0]) for name in PROJECTIONS) for pattern in
           ("{}_proj", "W_{}", "to_{}", "w{}", "{}_lin", "{}_linear", "{}")]  # fmt: skip
_LAYERS += [tuple(pattern.format(name) for name in PROJECTIONS) for pattern in
            ("{}", "{}_dense", "_{}_dense", "{}_proj", "{}_layer")]  # fmt: skip
_LAYERS += [(name,) for name in ("qkv", "qkv_proj", "Wqkv", "to_qkv", "in_proj", "c_attn")]
# A norm after the queries removes the factor by which their weights are scaled.
_NORMS = ("q_norm", "norm_q", "query_norm", "query_ln", "q_layernorm", "qk_norm")
# Parameters that multiply scores other than q.k, and the change that multiplies the logits of a head by a factor.
_SCALES = {"log_scale": "+= {log:.4g}", "log_bandwidth": "-= {half_log:.4g}", "w_v": "*= {factor:.4g}"}
# Names of layers behind the attention, such as "o_proj", "W_o", "to_out".
_OUTPUT = re.compile(r"(^|_)(w?o|out|output)(_|$)|^(dense|proj|c_proj)$")
# Attributes of attention layers with their number of heads.
_HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "num_query_heads", "n_head")
_MODELS = "a torch.nn.Module, a Keras model or layer, a flax.nnx.Module, or the parameters of a flax.linen.Module"


def qk_clip(
    model: Any,
    rows: Records | Sequence[Row],
    *,
    tau: float = 100.0,
    heads: Heads | None = None,
    layers: Sequence[str] | None = None,
) -> Any:
    """Scale query and key weights of heads whose largest logit s is above tau, by (tau / s) ** 0.5 each.

    The head's logits are then tau / s times as large; biases are scaled too. Where several heads share a key, the query
    weights alone are scaled, by tau / s. Of a head without a logit above 0, s is the standard deviation of the logits.
    Call it after a step of the optimiser, as the backward pass needs the weights of the forward pass.

    Parameters
    ----------
    model : torch.nn.Module, keras.Layer, flax.nnx.Module, or the parameters of a flax.linen.Module
        The model that was watched. Its weights change in place; of linen's ``variables["params"]`` a copy does.
    rows : Watch, or list of rows
        The watch: a sampled step scales a head once, however often this is called until the next one. Or all rows of
        some layers, as in ``seen.last()``, which each call applies: the same in each process of a parallel training.
    tau : float
        The largest logit that is allowed.
    heads : mapping of str to sequence of int, optional
        Heads that may be scaled, by the name of the layer in `rows`. Without it, all.
    layers : sequence of str, optional
        Where their names are unusual: the attributes of an attention layer that make queries, keys and values, or the
        one that makes the queries of all heads, then the keys, then the values.

    Returns
    -------
    dict of (str, int) to float, or the parameters
        Factor of the logits by layer and head, of the heads that were scaled. Of linen, the new parameters.

    Raises
    ------
    ArgumentError
        `model` is of no known framework, the projections of a head that must be scaled are not known or a norm follows
        them, its score is no multiple of q.k, as a cosine (`clip` of its row is NaN), `rows` lack heads of a layer,
        `heads` has others than `rows`, or `tau` is not a number above 0.

    References
    ----------
    Kimi Team: *Kimi K2: Open Agentic Intelligence*, 2025, arXiv 2507.20534: QK-clip in the optimiser MuonClip.

    Examples
    --------
    >>> import torch
    >>> from attnscore.diagnostics import watch
    >>> layer = torch.nn.MultiheadAttention(8, 2, bias=False)
    >>> with torch.no_grad():
    ...     _ = layer.in_proj_weight[:16].copy_(torch.eye(8).repeat(2, 1))
    >>> with watch(layer) as seen:
    ...     out, _ = layer(*[4 * torch.eye(8)] * 3)
    >>> qk_clip(layer, seen, tau=2.0, heads={"(model)": [1]})
    {('(model)', 1): 0.25}
    """
    check_positive("tau", tau)
    weights, counts = _Weights(model, layers), _head_counts(rows)
    allowed = _checked_heads(heads if counts else None, counts)  # a watch that was cleared has no layers
    clipped = rows.clipped if isinstance(rows, Records) else set()
    factors: dict[tuple[str, int], float] = {}
    of_other_scores: set[tuple[str, int]] = set()
    for row in rows.last() if isinstance(rows, Records) else rows:
        name, head = row["layer"], row["head"]
        size = logit_size(row)
        if head in allowed.get(name, ()) and tau < size < math.inf:
            module_head = (weights.module_of(name, counts), head)
            if module_head not in clipped:  # a module that is called twice has one factor, the smaller one
                factors[module_head] = min(tau / size, factors.get(module_head, 1.0))
                if math.isnan(row.get("clip", 1.0)):
                    of_other_scores.add(module_head)
    changes = []
    for (name, head), factor in factors.items():
        if (name, head) in of_other_scores:
            weights.refuse_score(name, head, factor)
        weights.check_no_norm(name, factor)
        of_layer = weights.projections(name, counts)
        scaled, power = (("query", "key"), 0.5) if of_layer.kv_heads == of_layer.heads else (("query",), 1.0)
        for projection in scaled:
            changes += [(entries, factor**power) for entries in of_layer.of_head(projection, head)]
    for entries, factor in changes:
        weights.set(entries, weights.get(entries) * factor)
    clipped.update(factors)
    return weights.parameters() if weights.framework == "linen" else factors


def reset_heads(
    model: Any,
    rows: Records | Sequence[Row],
    heads: Heads,
    projections: Sequence[str] = ("query",),
    *,
    layers: Sequence[str] | None = None,
    seed: int = 0,
) -> Any:
    """Draw weights of projections of heads anew, uniform in ±(6 / (inputs + outputs)) ** 0.5, and set biases to 0.

    Parameters
    ----------
    model, rows, layers
        As in `qk_clip`; of `rows`, the number of heads of each layer is needed.
    heads : mapping of str to sequence of int
        Heads, by the name of the layer in `rows`.
    projections : sequence of str
        Some of "query", "key" and "value". A key or value that several heads share needs all of them in `heads`.
    seed : int
        Chooses the numbers.

    Returns
    -------
    None, or the parameters
        Of linen, the new parameters.

    Raises
    ------
    ArgumentError
        As in `qk_clip`; `heads` has some of the heads that share a key or value, or a projection has another name.

    Examples
    --------
    >>> import torch
    >>> from attnscore.diagnostics import watch
    >>> layer = torch.nn.MultiheadAttention(8, 2)
    >>> with torch.no_grad():
    ...     _ = layer.in_proj_weight[4:8].zero_()  # the queries of head 1
    >>> with watch(layer) as seen:
    ...     out, _ = layer(*[torch.randn(5, 8)] * 3)
    >>> reset_heads(layer, seen, {"(model)": [1]})
    >>> bool((layer.in_proj_weight[4:8] != 0).all())
    True
    """
    check_count("seed", seed)
    weights, counts = _Weights(model, layers), _head_counts(rows)
    draws = []
    for name, chosen in _checked_heads(heads, counts).items():
        of_layer = weights.projections(weights.module_of(name, counts), counts)
        for projection, head in itertools.product(projections, chosen):
            check_choice("projections", projection, PROJECTIONS)
            if others := of_layer.sharing(projection, head) - {*chosen}:
                expected = f"all heads that share a {projection} with head {head}: {sorted(others)} too"
                hint = f"or leave {projection!r} out of `projections`"
                raise ArgumentError(message(f"heads[{name!r}]", expected, shown(chosen), hint=hint))
            key = (seed, head, PROJECTIONS.index(projection))
            draws += [(entries, key) for entries in of_layer.of_head(projection, head)]
    for entries, key in draws:
        weights.set(entries, _drawn(entries, weights.get(entries).shape, key))
    return weights.parameters() if weights.framework == "linen" else None


# ---------------------------------------------------------------- where the weights of a head are


class _Entries(NamedTuple):
    """Entries along one axis of an array: weights or biases of a projection, head by head, or of one head."""

    owner: Any
    """Module, layer or dictionary with the array."""
    name: str
    axis: int
    start: int
    length: int
    place: int | None = None
    """Index in one more axis in front, on which a loop has stacked the arrays of its layers."""

    @property
    def slices(self) -> tuple[Any, ...]:
        """Index of the entries in the array."""
        place = () if self.place is None else (self.place,)
        return (*place, *[slice(None)] * self.axis, slice(self.start, self.start + self.length))


class _Projections(NamedTuple):
    """Arrays that make the queries, keys and values of an attention layer, weights before biases."""

    arrays: Mapping[str, Sequence[_Entries]]
    heads: int
    kv_heads: int

    def of_head(self, projection: str, head: int) -> Iterator[_Entries]:
        """Yield the entries of a head in each array of a projection."""
        count, group = (self.heads, 1) if projection == "query" else (self.kv_heads, self.heads // self.kv_heads)
        for array in self.arrays[projection]:
            size = array.length // count
            yield array._replace(start=array.start + size * (head // group), length=size)

    def sharing(self, projection: str, head: int) -> set[int]:
        """Return the heads that share a head's entries in a projection."""
        group = 1 if projection == "query" else self.heads // self.kv_heads
        return {other for other in range(self.heads) if other // group == head // group}


class _Weights:
    """Weights of a model: how its framework finds and changes them."""

    def __init__(self, model: Any, layers: Sequence[str] | None) -> None:
        framework = framework_of(model) or ("linen" if isinstance(model, Mapping) else None)
        if framework is None or (framework == "linen" and not isinstance(model, Mapping)):
            raise ArgumentError(message("model", _MODELS, type(model).__name__))
        if layers is not None and (isinstance(layers, str) or len(layers) not in (1, 3)):
            raise ArgumentError(message("layers", "three names, or one", shown(layers)))
        self.framework = framework
        self._class, self._model = type(model), _copied(model) if framework == "linen" else model
        self._kernel = "weight" if framework == "torch" else "kernel"
        self._layers = () if layers is None else tuple(layers)

    def parameters(self) -> Any:
        """Return the changed parameters of linen, in a mapping of the class that came."""
        return self._class(self._model)

    def get(self, entries: _Entries) -> Any:
        """Return the values of some entries."""
        return _child(entries.owner, entries.name)[entries.slices]

    def set(self, entries: _Entries, values: Any) -> None:
        """Replace some entries."""
        array = _child(entries.owner, entries.name)
        if self.framework == "torch":
            import torch

            with torch.no_grad():
                array[entries.slices] = torch.as_tensor(values).to(array)
        elif self.framework == "keras":
            import keras

            start = [each.start or 0 for each in entries.slices] + [0] * (len(array.shape) - len(entries.slices))
            array.assign(keras.ops.slice_update(array.value, start, keras.ops.cast(values, array.dtype)))
        elif self.framework == "nnx":
            array[...] = array[...].at[entries.slices].set(values.astype(array.dtype))
        else:
            entries.owner[entries.name] = array.at[entries.slices].set(values.astype(array.dtype))

    def refuse_score(self, name: str, head: int, factor: float) -> NoReturn:
        """Raise ArgumentError that says what multiplies the scores of a head by a factor."""
        layer = self._layer(_module_name(name))
        if scale := next((scale for scale in _SCALES if _shape(layer, scale)), None):
            change = _SCALES[scale].format(factor=factor, log=math.log(factor), half_log=math.log(factor) / 2)
            hint = f"change the scale of the score: layer.{scale}[{head}] {change}"
        else:
            hint = "change the scale of the score, as `scale` of Cosine or `bandwidth` of Gaussian"
        expected = f"rows of a score that is q.k times a number, which weights scale, in {name!r}"
        raise ArgumentError(message("rows", expected, "another score", hint=hint))

    def check_no_norm(self, name: str, factor: float) -> None:
        """Raise ArgumentError if a layer normalises its queries."""
        layer = self._layer(_module_name(name))
        if norm := next((norm for norm in _NORMS if _child(layer, norm) is not None), None):
            hint = f"the weights of {norm} scale the logits of all heads: layer.{norm}.weight *= {factor:.3g}"
            raise ArgumentError(message("model", f"no norm behind the queries of {name!r}", norm, hint=hint))

    def module_of(self, call: str, counts: Mapping[str, int]) -> str:
        """Return the name of the module of an attention call; "name #3" for the third layer of a loop's stack.

        The loop makes the calls, which are in `counts`, in the order of the layers.
        """
        name = _module_name(call)
        length, calls = self._stacked(name, counts), sum(_module_name(other) == name for other in counts)
        if not length or calls % length:
            return name
        number = int((re.findall(r" #(\d+)", call) or [1])[0])
        return f"{name} #{(number - 1) * length // calls + 1}"

    def _stacked(self, name: str, counts: Mapping[str, int]) -> int:
        """Return how many layers a loop has stacked in the arrays of one; 0 where they are one layer's."""
        layer, heads = self._layer(name), counts[name]
        is_flax = self.framework in ("nnx", "linen")
        arrays = self._arrays(layer, heads, 0) if is_flax and self._arrays(layer, heads) is None else None
        return _shape(arrays["query"][0].owner, self._kernel)[0] if arrays else 0

    def projections(self, name: str, counts: Mapping[str, int]) -> _Projections:
        """Return the projections of the layer of a name, with its number of heads."""
        module, _, number = name.partition(" #")
        layer, heads = self._layer(module), counts[module]
        declared = next((x for attribute in _HEAD_COUNTS if is_whole(x := _child(layer, attribute))), heads)
        if declared != heads:
            raise ArgumentError(message("rows", f"rows of all {declared} heads of {name!r}", f"{heads} of them"))
        arrays = self._arrays(layer, heads, int(number) - 1 if number else None)
        if arrays is not None:
            queries, keys, values = (arrays[projection][0].length for projection in PROJECTIONS)
            kv_heads = keys * heads // queries
            if not (queries % heads or keys * heads % queries or heads % kv_heads or values % kv_heads):
                return _Projections(arrays, heads, kv_heads)
        children = [*layer] if isinstance(layer, Mapping) else [*vars(layer), *getattr(layer, "_modules", ())]
        shapes = {child: shape for child in children if (shape := _shape(_child(layer, child), self._kernel))}
        expected = f"projections of {heads} heads in {name!r}, named as q_proj, query, W_q, to_q, qkv or in_proj_weight"
        listed = ", ".join(f"{child} {shape}" for child, shape in shapes.items()) or "no layers with weights"
        inputs = [child for child in shapes if not _OUTPUT.search(child)]
        # Queries, keys, values; a mapping of JAX sorts them by name.
        inputs.sort(key=lambda child: next((place for place, x in enumerate("qkv") if x in child.lower()), 3))
        has_usual_names = any(set(names) <= set(inputs) for names in _LAYERS)
        if len(inputs) > 2 and not has_usual_names:
            hint = f"say what makes its queries, keys and values: layers={(*inputs,)[:3]}"
        else:  # one layer in an order of its own, or arrays in shapes of their own
            widest = max(shapes, key=lambda child: math.prod(shapes[child]), default="W_q")
            line = f"layer.{widest}.{self._kernel}[rows] *= factor ** 0.5"
            hint = f"change the head's queries and keys by lines of your own, as {line}"
        raise ArgumentError(message("model", expected, f"{type(layer).__name__} with {listed}", hint=hint))

    def _layer(self, name: str) -> Any:
        """Return the module or layer with a dotted name."""
        module = self._model
        for step in name.split(".") if name != WHOLE else ():
            if self.framework == "keras":
                from attnscore.diagnostics.watching.keras_watch import layer_in

                module = layer_in(module, step)
            else:
                module = _child(module, step)
        if module is None:
            raise ArgumentError(message("model", f"a model with {name!r}, as in `rows`", self._class.__name__))
        return module

    def _arrays(self, layer: Any, heads: int, place: int | None = None) -> dict[str, list[_Entries]] | None:
        """Return the arrays of a layer's projections, at `place` if stacked; None with other names or shapes."""
        for names in [self._layers, *_LAYERS] if self._layers else _LAYERS:
            owners = [_child(layer, name) for name in names]
            shapes = [_shape(owner, self._kernel)[place is not None :] for owner in owners]
            is_flat = all(len(shape) == 2 for shape in shapes)
            has_head_axis = self.framework != "torch" and all(len(shape) == 3 for shape in shapes)
            if not is_flat and not (has_head_axis and shapes[0][1] == heads):
                continue
            axis = int(self.framework != "torch" or "Conv1D" in type(owners[0]).__name__)  # weights (inputs, outputs)
            lengths, starts = [shape[axis] for shape in shapes], [0, 0, 0]
            if len(names) == 1:
                width = lengths[0] // 3
                # Grouped keys have fewer heads than queries, and another width.
                if not is_flat or lengths[0] % 3 or (width != shapes[0][1 - axis] and names != self._layers):
                    continue
                owners, lengths, starts = owners * 3, [width] * 3, [0, width, 2 * width]
            return {
                projection: [
                    _Entries(owner, name, along, start, length, place)
                    for name, along in ((self._kernel, axis), ("bias", 0))
                    if _shape(owner, name)
                ]
                for projection, owner, start, length in zip(PROJECTIONS, owners, starts, lengths, strict=True)
            }
        return _arrays_of_pytorch(layer) if self.framework == "torch" else None


def _arrays_of_pytorch(layer: Any) -> dict[str, list[_Entries]] | None:
    """Return the arrays of ``nn.MultiheadAttention``, whose weights are apart where keys have another width."""
    is_apart = bool(_shape(layer, "q_proj_weight"))
    if not is_apart and not _shape(layer, "in_proj_weight"):
        return None
    width = _shape(layer, "q_proj_weight")[0] if is_apart else _shape(layer, "in_proj_weight")[0] // 3
    arrays = {}
    for projection, start in zip(PROJECTIONS, (0, width, 2 * width), strict=True):
        name, first = (f"{projection[0]}_proj_weight", 0) if is_apart else ("in_proj_weight", start)
        arrays[projection] = [_Entries(layer, name, 0, first, width)]
        if _shape(layer, "in_proj_bias"):
            arrays[projection].append(_Entries(layer, "in_proj_bias", 0, start, width))
    return arrays


def _child(owner: Any, name: str) -> Any:
    """Return an entry of a mapping or a list, or an attribute; None where there is none."""
    if isinstance(owner, Mapping):
        return owner.get(name)
    if isinstance(owner, Sequence) and name.isdigit():
        return owner[int(name)] if int(name) < len(owner) else None
    return getattr(owner, name, None)


def _shape(owner: Any, name: str) -> tuple[int, ...]:
    """Return the shape of an entry or attribute; () where there is no such array."""
    return tuple(getattr(_child(owner, name), "shape", ()))


def _copied(tree: Any) -> Any:
    """Copy nested mappings to dictionaries; anything else is returned as it is."""
    return {key: _copied(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _drawn(entries: _Entries, shape: Sequence[int], key: Sequence[int]) -> NDArray[np.float64]:
    """Return values drawn as `reset_heads` says for weights of a head, zeros for its biases; `key` seeds the draw."""
    if "bias" in entries.name:
        return np.zeros(shape)
    inputs = shape[1 - entries.axis]
    bound = math.sqrt(6 / (inputs + math.prod(shape) / inputs))
    return np.random.default_rng(key).uniform(-bound, bound, shape)


def _module_name(layer: str) -> str:
    """Return the name of the module of an attention call, without the numbers of the call and of its heads.

    >>> _module_name("layers.0.attn #2"), _module_name("attn (4 heads)")
    ('layers.0.attn', 'attn')
    """
    return re.sub(r"( #\d+| \(\d+ heads\))+$", "", layer)


# ---------------------------------------------------------------- arguments


def _head_counts(rows: Records | Sequence[Row]) -> dict[str, int]:
    """Return the number of heads of each attention call, and of its module."""
    counts: dict[str, int] = {}
    if isinstance(rows, Records):
        counts = {name: layer.heads for name, layer in rows.layers.items()}
    elif not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) and "max_logit" in row for row in rows):
        raise ArgumentError(message("rows", "a watch, or a list of its rows", shown(rows)))
    else:
        for name in dict.fromkeys(row["layer"] for row in rows):
            heads = sorted(row["head"] for row in rows if row["layer"] == name)
            counts[name] = len(heads)
            if heads != [*range(counts[name])]:
                raise ArgumentError(message("rows", f"rows of all heads of {name!r}", f"those of {heads}"))
    return {_module_name(name): count for name, count in counts.items()} | counts


def _checked_heads(heads: Heads | None, counts: Mapping[str, int]) -> Heads:
    """Return heads by layer; without `heads`, all."""
    if heads is None:
        return {name: range(count) for name, count in counts.items()}
    if not isinstance(heads, Mapping) or not heads.keys() <= counts.keys():
        raise ArgumentError(message("heads", f"lists of heads by layer, of {list(counts)}", shown(heads)))
    for name, numbers in heads.items():
        if not isinstance(numbers, Sequence) or not all(is_whole(x) and 0 <= x < counts[name] for x in numbers):
            expected = f"a list of heads from 0 to {counts[name] - 1}"
            raise ArgumentError(message(f"heads[{name!r}]", expected, shown(numbers)))
    return heads
