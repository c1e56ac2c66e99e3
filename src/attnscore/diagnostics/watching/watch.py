"""The call that watches a model: it chooses the observer by the model's class, without importing a framework."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attnscore.diagnostics.watching.base import Watch
from attnscore.diagnostics.watching.health import Thresholds
from attnscore.diagnostics.watching.records import Row
from attnscore.diagnostics.watching.remedies import Framework
from attnscore.errors import ArgumentError, message

# The classes of models, by module and name. Keras first: on its torch backend its layers are PyTorch's modules too.
_CLASSES: dict[Framework, tuple[str, str]] = {
    "keras": ("keras", "Layer"),
    "torch": ("torch.nn", "Module"),
    "nnx": ("flax.nnx", "Module"),
    "linen": ("flax.linen", "Module"),
}
_WATCHED = "a torch.nn.Module, a Keras model or layer, a flax.nnx.Module or a flax.linen.Module"


def watch(
    model: Any,
    *,
    every: int = 1,
    thresholds: Thresholds | None = None,
    on_step: Callable[[int, list[Row]], Any] | None = None,
    history: int = 1000,
    softmax: str | Iterable[str] | Mapping[str, int | None] = (),
    one_pass: bool = False,
) -> Watch:
    """Watch every attention call of a model: a context manager, or ``start()`` and ``stop()``.

    The model is not changed: its own functions run, and statistics of their queries and keys are computed in a pass of
    their own, in O(n) memory. The framework decides which calls are recorded.

    - PyTorch: ``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward``, the fused functions of
      ``nn.TransformerEncoder``, the attention functions of Hugging Face's models, eager included, `attend` with the
      layers of this library, and a softmax written by hand in modules that `softmax` names. Not recorded: compiled or
      scripted code, functions bound to something else than a module's name.
    - Flax, NNX and linen: ``jax.nn.dot_product_attention``, the attention functions of Flax with its layers, and
      `attend` with the layers of this library; also in programs that are traced during the watch, by ``jit`` and the
      other transformations. In them `on_step` is called by the program, and must not call JAX.
    - Keras, on each of its backends: its attention layers, ``keras.ops.dot_product_attention``, and `attend` with the
      layers of this library; also in ``fit``, ``evaluate`` and ``predict``.

    Parameters
    ----------
    model : torch.nn.Module, keras.Layer, flax.nnx.Module or flax.linen.Module
    every : int
        Sample one step in `every`; a step is one call of the model, or of the part of it that is called first where
        the model itself is not.
    thresholds : Thresholds, optional
        Thresholds of the verdicts.
    on_step : callable (step, rows), optional
        Called after each sampled step with a row for each head: for logs, for stopping a training run. It comes before
        the backward pass, which needs the weights unchanged; a repair follows the optimiser's step, with `last`.
    history : int
        Number of sampled steps that are kept for trends and plots.
    softmax : names of modules, or a mapping of names to heads
        Of a PyTorch model: modules whose own softmax over the last axis belongs to attention, as in BLOOM and
        DeBERTa; ``*`` in a name stands for anything. Scores of four axes are (batch, head, query, key); of three,
        (batch, query, key), or (batch * head, query, key) where the mapping gives the heads.
    one_pass : bool
        Of a PyTorch model: on sampled steps, compute ``F.scaled_dot_product_attention`` on the CPU by `attend`, in the
        pass that gives the statistics. The output agrees to rounding. A sampled step of long sequences then takes about
        as long as another, one of short sequences less than with a second pass. Calls with dropout, under autocast or
        inside checkpointing keep PyTorch's function and a pass of their own.

    Returns
    -------
    Watch
        Context manager with `start`, `stop` and the records: `rows`, `last`, `verdicts`, `failing`, `table`, `plot`,
        `json_lines`, `unseen`.

    Raises
    ------
    ArgumentError
        `model` is of no known framework, a number is not whole, `on_step` is not callable, `one_pass` is no bool, or a
        name in `softmax` belongs to no module.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with watch(layer) as seen:
    ...     out, _ = layer(*[torch.randn(1, 5, 8)] * 3)
    >>> [(row["layer"], row["head"], row["rows"]) for row in seen.rows()]
    [('(model)', 0, 5), ('(model)', 1, 5)]
    """
    arguments = (model, every, thresholds, on_step, history)
    framework = framework_of(model)
    if framework == "torch":
        from attnscore.diagnostics.watching.torch_watch import TorchWatch

        return TorchWatch(*arguments, softmax=softmax, one_pass=one_pass)
    for name, value, default in (("softmax", softmax, ()), ("one_pass", one_pass, False)):
        if framework is not None and value != default:
            raise ArgumentError(message(name, "nothing, as the model is not PyTorch's", repr(value)))
    if framework == "keras":
        from attnscore.diagnostics.watching.keras_watch import KerasWatch

        return KerasWatch(*arguments)
    if framework in ("nnx", "linen"):
        from attnscore.diagnostics.watching.jax_watch import JaxWatch

        return JaxWatch(*arguments)
    raise ArgumentError(message("model", _WATCHED, type(model).__name__))


def framework_of(model: Any) -> Framework | None:
    """Return the framework of a model; None if no imported framework has its class."""
    for framework, (module, name) in _CLASSES.items():
        base = getattr(sys.modules.get(module), name, None)
        if base is not None and isinstance(model, base):
            return framework
    return None
