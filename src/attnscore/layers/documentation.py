"""Docstrings of the layers, written once: the class of a layer, and its call, in every framework.

The parameters are listed in the order of the signature, so that the two cannot disagree.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

from attnscore.layers.shared import with_constructor

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

# {more} are further arguments, {ready} a line before the first call.
_EXAMPLES = {
    "DotProductAttention": """
>>> layer = DotProductAttention()
>>> values = ones((2, 10, 4)).cumsum(1)
>>> out = layer(ones((2, 1, 2)), ones((2, 10, 2)), values, valid_lens=[2, 6])
>>> [round(float(x), 3) for x in out[:, 0, 0]]
[1.5, 3.5]
>>> tuple(layer.attention_weights.shape)
(2, 1, 10)
""",
    "AdditiveAttention": """
>>> layer = AdditiveAttention(num_hiddens=8, dropout=0.1{more})
>>> {ready}
>>> tuple(layer(ones((2, 1, 20)), ones((2, 10, 2)), ones((2, 10, 4)), valid_lens=[2, 6]).shape)
(2, 1, 4)
""",
    "BilinearAttention": """
>>> layer = BilinearAttention({more})
>>> {ready}
>>> tuple(layer(ones((2, 1, 20)), ones((2, 10, 2)), ones((2, 10, 4))).shape)
(2, 1, 4)
""",
    "GaussianAttention": """
>>> layer = GaussianAttention(bandwidth=0.5)
>>> x = ones((1, 3, 1)).cumsum(1)
>>> [round(float(y), 3) for y in layer(2 * ones((1, 1, 1)), x, x)[:, 0, 0]]
[2.0]
""",
    "MultiHeadAttention": """
>>> layer = MultiHeadAttention(num_hiddens=8, num_heads=2, score="additive"{more})
>>> {ready}
>>> x = ones((3, 5, 6))
>>> tuple(layer(x, x, x, valid_lens=[1, 3, 5]).shape)
(3, 5, 8)
>>> tuple(layer.attention_weights.shape)
(3, 2, 5, 5)
""",
}

_OPTIONS = """
bandwidth : number above 0
    Width of the kernel, in the units of queries and keys.
learn_bandwidth : bool
    Make it a parameter that starts at `bandwidth`. It is learned as its logarithm, so that it stays above 0.
num_hiddens : int
    Hidden units of the additive score, the size of w_v. Multi-head: features of the result, of which each head has
    num_hiddens / num_heads.
num_heads : int
dropout : number in [0, 1)
    Probability of dropping a weight, in training.
scaled : bool
    False leaves the division by sqrt(dim) out.
normalizer : "softmax", "sigmoid", "sparsemax", "entmax15" or an `Entmax`
    How scores become weights, see `attnscore.attend`. Others than the softmax have no sink.
bias : bool
    Whether the four projections have one.
score : {"scaled_dot", "dot", "gaussian", "cosine", "additive", "bilinear"}, or a score object
    A name has one set of parameters per head: ``w_v`` (heads, h) of the additive score, which shares W_q and W_k with
    the layer, ``W`` (heads, dim, dim), ``log_bandwidth`` (heads,), and ``log_scale`` (heads,) of the cosine.
    An object may have names inside, ``SoftCap("additive", 50.0)``, or none, ``Dot() + 0.5 * Gaussian()``. Its arrays,
    of NumPy or the framework, become parameters ``score_temperature``, ``score_weights_1`` that start at these numbers.
score_hiddens : int, optional
    h of the additive score; None: num_hiddens / num_heads.
num_key_value_heads : int, optional
    Fewer heads for keys and values than for queries (grouped-query or multi-query attention).
sink : bool
    Learn a logit ``sink`` (heads,) without a value in each head's softmax; it starts at 0.
qk_norm : bool
    Divide queries and keys of each head by their root mean square, times a learned ``q_norm`` and ``k_norm`` (dim,).
rotary : function (queries, keys, positions) of (queries, keys), optional
    Rotary embedding of projected queries and keys (batch, length, head, dim) at positions (batch or 1, length), which
    continue a cache's. A module is a submodule of the layer.
context_group : ProcessGroup or DeviceMesh of one axis, optional
    Ranks that hold parts of the sequence: the layer is called with the rank's positions, and with the mask and valid
    lengths of the whole, see `attnscore.parallel.torch.attend`. Gradients of the parameters are the rank's share, for
    DistributedDataParallel or FSDP over these ranks too to add up. No weights are kept.
query_size, key_size, value_size : int, optional
    Features of the inputs; None: inferred at the first call.
keep_last : bool
    Whether to keep the inputs from which `attention_weights` is computed.
"""

_CALL = """
queries : (batch, query, features)
keys : (batch, key, features)
    `AdditiveAttention` also takes the result of its `prepare_keys`.
values : (batch, key, features)
valid_lens : (batch,) or (batch, query) whole numbers, optional
    With a cache (batch,): how many of the new positions are real.
mask : a mask object, or a boolean array broadcastable to (batch, query, key), True = may attend; optional
    With a cache the keys are its slots, and causal order is kept without a mask.
bias : broadcastable to (batch, query, key), with heads to (batch, head, query, key), optional
    Added to the scores, and gets a gradient. With heads (head, 1, query + key - 1) is one number for each relative
    offset, key minus query.
"""
_CACHE = """
cache : KeyValueCache, optional
    For a layer with heads; made with ``head_axis=-2`` and no score. Keys and values are appended, and the queries, at
    the same positions, attend to all before. The weights of the call are then over the slots of the cache.
"""
RETURNS_CACHE = _CACHE + "    The call returns the new cache too, last.\n"

_AFTER_CALL = """
Returns
-------
out : (batch, query, features of the values, or num_hiddens)

Raises
------
ShapeError, DtypeError, DeviceError, FrameworkError, MaskError, ArgumentError
"""


@dataclass(frozen=True)
class Documentation:
    """The parts of the docstrings that differ by framework; gives decorators of its classes."""

    imports: str
    """The line of an example that imports ``ones``."""
    options: str = ""
    """Arguments of the constructors, in numpydoc's form."""
    more: str = ""
    """Arguments that a layer with parameters always needs."""
    ready: str = ""
    """The line between the constructor and the first call."""

    def __call__(self, without: Collection[str] = (), required: Collection[str] = ()) -> Callable[[Class], Class]:
        """Return a decorator that gives a layer's class its constructor and docstring, see `with_constructor`."""

        def decorate(cls: Class) -> Class:
            made: Any = with_constructor(cls, without, required)
            example = _EXAMPLES[cls.__name__].replace("({more})", f"({self.more})")
            example = example.replace("{more}", self.more and f", {self.more}")
            example = example.replace(">>> {ready}\n", self.ready and f">>> {self.ready}\n")
            parameters = _parameters(made.__init__, _OPTIONS + self.options)
            examples = f"Examples\n--------\n>>> {self.imports}{example}"
            # The docstring in the source is for readers alone.
            cls.__doc__ = f"{inspect.getdoc(cls.__bases__[0])}\n\n{parameters}\n\n{examples}"
            return cls

        return decorate


def documented_call(options: str = "") -> Callable[[Function], Function]:
    """Give a layer's call its docstring; `options` are the arguments of the framework, in numpydoc's form."""

    def decorate(call: Function) -> Function:
        call.__doc__ = f"Attention pooling.\n\n{_parameters(call, _CALL + _CACHE + options)}\n{_AFTER_CALL}"
        return call

    return decorate


def _parameters(function: Callable[..., Any], texts: str) -> str:
    """Return the section of the parameters. Of two entries for one name the later wins."""
    entries = re.findall(r"^(\w.*?)( :.*)?\n((?: +.*\n)*)", texts, flags=re.MULTILINE)
    entry = {name: f"{kind}\n{below}".rstrip() for names, kind, below in entries for name in names.split(", ")}
    parameters = [x for x in inspect.signature(function).parameters.values() if x.name != "self"]
    named = [("**" * (x.kind is x.VAR_KEYWORD) + x.name, entry[x.name]) for x in parameters]
    # Neighbours with one text share an entry.
    groups = itertools.groupby(named, itemgetter(1))
    return "Parameters\n----------\n" + "\n".join(", ".join(name for name, _ in group) + text for text, group in groups)
