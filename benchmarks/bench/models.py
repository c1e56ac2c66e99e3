"""Whole models with our attention and with the attention that their users have without us.

- A builder takes the sizes of its case and returns a `Pair`: both sides have equal parameters and equal inputs.
- A training step is forward and backward, without an optimiser; Keras runs ``train_on_batch``, with one.
- Compared are the loss and gradients, or the outputs of an inference, before anything is timed.
- Frameworks are imported by the builders alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

import attnscore as ats
from bench.reference import WrongResult, relative_difference

Run = Callable[..., Any]
# Relative to the largest number of an array: a training step in float32 through four layers differs by about 1e-6.
_ALLOWED = 1e-4
_VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Pair:
    """A model on both sides: the calls to time, each of which returns its arrays."""

    ours: Run
    theirs: Run
    compared: tuple[Run, Run] | None = None
    """The calls to compare, where those to time give other arrays: dropout draws differently on each side."""

    def check(self, name: str) -> dict[str, float]:
        """Return the largest difference of both sides with the allowed one; `WrongResult` where it is larger."""
        ours, theirs = (list(run()) for run in self.compared or (self.ours, self.theirs))
        # NumPy's maximum keeps a NaN.
        error = float(np.max([relative_difference(*arrays) for arrays in zip(ours, theirs, strict=True)]))
        if not error <= _ALLOWED:
            raise WrongResult(f"{name}: the sides differ by {error:.3g}, allowed {_ALLOWED:.3g}")
        return {"error": error, "allowed": _ALLOWED}


def _pair(side: Callable[[Any], Run], models: Iterable[Any]) -> Pair:
    ours, theirs = map(side, models)
    return Pair(ours, theirs)


# ------------------------------------------------------------------ PyTorch


def _step(model: Any, inputs: Sequence[Any]) -> Run:
    """Return a training step; gradients are ordered by name, since layers hold equal parameters in different orders."""
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]

    def run() -> list[Any]:
        model.zero_grad()
        loss = model(*inputs)
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in parameters)]

    return run


def _translation(
    *, batch: int, steps: int, width: int, layers: int, vocabulary: int, prepares_keys: bool = False
) -> Pair:
    """Return the translation model of *Dive into Deep Learning* (D2L), with its attention and with ours.

    With `prepares_keys` our decoder projects the keys once, in place of once for each step.
    """
    import torch
    from torch import nn

    from attnscore.layers.torch import AdditiveAttention

    def masked_softmax(scores: Any, valid_lens: Any) -> Any:
        shape = scores.shape
        flat, lens = scores.reshape(-1, shape[-1]), torch.repeat_interleave(valid_lens, shape[1])
        flat[~(torch.arange(shape[-1], dtype=torch.float32)[None, :] < lens[:, None])] = -1e6
        return nn.functional.softmax(flat.reshape(shape), dim=-1)

    class D2LAdditiveAttention(nn.Module):
        def __init__(self, num_hiddens: int) -> None:
            super().__init__()
            self.W_k, self.W_q = (nn.Linear(width, num_hiddens, bias=False) for _ in "kq")
            self.w_v = nn.Linear(num_hiddens, 1, bias=False)

        def forward(self, queries: Any, keys: Any, values: Any, valid_lens: Any) -> Any:
            features = torch.tanh(self.W_q(queries).unsqueeze(2) + self.W_k(keys).unsqueeze(1))
            self.attention_weights = masked_softmax(self.w_v(features).squeeze(-1), valid_lens)
            return torch.bmm(self.attention_weights, values)

    class Translation(nn.Module):
        def __init__(self, attention: Any) -> None:
            super().__init__()
            self.attention = attention
            self.source, self.target = (nn.Embedding(vocabulary, width) for _ in "st")
            self.encoder, self.decoder = nn.GRU(width, width, layers), nn.GRU(2 * width, width, layers)
            self.dense = nn.Linear(width, vocabulary)

        def forward(self, source: Any, lens: Any, target: Any, labels: Any) -> Any:
            memory, state = self.encoder(self.source(source).permute(1, 0, 2))
            memory, outputs, self.weights = memory.permute(1, 0, 2), [], []
            is_prepared = prepares_keys and isinstance(self.attention, AdditiveAttention)
            keys = self.attention.prepare_keys(memory) if is_prepared else memory
            for x in self.target(target).permute(1, 0, 2):
                context = self.attention(state[-1].unsqueeze(1), keys, memory, lens)
                both = torch.cat((context, x.unsqueeze(1)), dim=-1)
                out, state = self.decoder(both.permute(1, 0, 2), state)
                outputs.append(out)
                # As the book's decoder does, on both sides.
                self.weights.append(self.attention.attention_weights)
            logits = self.dense(torch.cat(outputs)).permute(1, 0, 2)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    ours = Translation(AdditiveAttention(width, query_size=width, key_size=width))
    theirs = Translation(D2LAdditiveAttention(width))
    theirs.load_state_dict(ours.state_dict())
    source, target, labels = torch.randint(vocabulary, (3, batch, steps))
    inputs = source, torch.randint(1, steps + 1, (batch,)), target, labels
    return _pair(functools.partial(_step, inputs=inputs), (ours, theirs))


def _transformers(
    ours: dict[str, Any], sdpa: dict[str, Any], real: Any = None,
    *, batch: int, tokens: int, layers: int, heads: int, width: int, packs: bool = False,
) -> Pair:  # fmt: skip
    """Return training steps of a transformer with `attend` and with PyTorch's function, each with its options.

    `real` is (batch, token), False where there is padding. With `packs` our model gets the real tokens alone.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, attention: Run) -> None:
            super().__init__()
            self.attention, self.before, self.between = attention, nn.LayerNorm(width), nn.LayerNorm(width)
            # Without a bias: the gradient of the keys' is zero but for rounding.
            self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
            self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            arrays = self.project(self.before(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.out(self.attention(*arrays).transpose(1, 2).flatten(2))
            return x + self.feed(self.between(x))

    class Transformer(nn.Module):
        def __init__(self, attention: Run) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(_VOCABULARY, width), nn.Embedding(tokens, width)
            self.blocks = nn.Sequential(*(Block(attention) for _ in range(layers)))
            self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, _VOCABULARY)

        def forward(self, ids: Any, labels: Any, positions: Any) -> Any:
            x = self.blocks(self.tokens(ids) + self.positions(positions))
            logits = self.logits(self.norm(x)).flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-1)

    torch.manual_seed(0)
    ids, labels = torch.randint(_VOCABULARY, (2, batch, tokens))
    if real is not None:
        labels[~real] = -1
    attend, theirs = ats.attend, nn.functional.scaled_dot_product_attention
    models = [Transformer(functools.partial(attend, **ours)), Transformer(functools.partial(theirs, **sdpa))]
    models[1].load_state_dict(models[0].state_dict())
    inputs = ids, labels, torch.arange(tokens).expand(batch, -1)
    our_inputs = [x[real][None] for x in inputs] if packs else inputs
    return Pair(_step(models[0], our_inputs), _step(models[1], inputs))


def _gpt(*, dropout: float = 0.0, **sizes: Any) -> Pair:
    ours, sdpa = {"mask": ats.Causal(), "dropout": dropout}, {"is_causal": True, "dropout_p": dropout}
    pair = _transformers(ours, sdpa, **sizes)
    if not dropout:
        return pair
    plain = _gpt(**sizes)
    return replace(pair, compared=(plain.ours, plain.theirs))


def _padded_encoder(*, batch: int, tokens: int, packs: bool = False, **sizes: Any) -> Pair:
    import torch

    lens = torch.randint(1, tokens + 1, (batch,), generator=torch.Generator().manual_seed(0))
    real = torch.arange(tokens) < lens[:, None]
    ours = {"mask": ats.Packed([0, *lens.cumsum(0).tolist()])} if packs else {"valid_lens": lens}
    sdpa = {"attn_mask": real[:, None, None]}
    return _transformers(ours, sdpa, real, batch=batch, tokens=tokens, packs=packs, **sizes)


def _window_encoder(*, batch: int, tokens: int, window: int, **sizes: Any) -> Pair:
    import torch

    positions = torch.arange(tokens)
    allowed = (positions[:, None] - positions).abs() <= window
    mask = ats.SlidingWindow(left=window, right=window)
    return _transformers({"mask": mask}, {"attn_mask": allowed}, batch=batch, tokens=tokens, **sizes)


# ------------------------------------------------------------- transformers


def _by_both(model: Any, run: Callable[[Any], Any]) -> Pair:
    """Return the runs of a model of transformers with our attention and with its sdpa."""
    from attnscore.integrations.transformers import register

    models = [model, copy.deepcopy(model)]
    for each, implementation in zip(models, (register(), "sdpa"), strict=True):
        each.set_attn_implementation(implementation)
    return _pair(lambda each: functools.partial(run, each), models)


def _minilm(*, batch: int) -> Pair:
    """Return the sentence transformer of the demo on the demo's ten sentences, then on two of them at a time."""
    import torch

    from attnscore.cli.demo.command import read_sentences
    from attnscore.cli.demo.minilm import tokenize
    from attnscore.diagnostics.inspection import pretrained

    tokenizer, model = pretrained.load(pretrained.MINILM, extra="demo")
    sentences = read_sentences(None)[0]
    inputs = tokenize(tokenizer, [*sentences, *map(" ".join, pairwise(sentences))][:batch]).inputs
    real = inputs["attention_mask"].unsqueeze(-1)

    def run(model: Any) -> list[Any]:
        with torch.no_grad():
            # Outputs at padding are not read.
            return [(model(**inputs).last_hidden_state * real).sum(1) / real.sum(1)]

    return _by_both(model, run)


def _llama(*, batch: int, prompt: int, new: int, layers: int, width: int, heads: int, kv_heads: int) -> Pair:
    """Return the greedy generation of a random Llama; compared are the tokens and the logits of each."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=prompt + new,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 1024, (batch, prompt))
    options = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def run(model: Any) -> list[Any]:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return [found.sequences, *found.logits]

    return _by_both(model, run)


# ---------------------------------------------------------- Keras, and JAX


def _keras_classifier(*, batch: int, tokens: int, width: int, heads: int, vocabulary: int) -> Pair:
    """Return the text classifier of Keras's examples: one transformer block, mean over the tokens; no dropout."""
    import keras
    import tensorflow as tf

    from attnscore.layers.keras import MultiHeadAttention

    class Positions(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def build(self, shape: Any) -> None:
            self.table = self.add_weight(name="table", shape=shape[1:])

        def call(self, x: Any) -> Any:
            return x + self.table

    def classifier(attend: Run) -> Any:
        ids = keras.Input((tokens,), dtype="int32")
        x = Positions()(keras.layers.Embedding(vocabulary, width)(ids))
        x = keras.layers.LayerNormalization(epsilon=1e-6)(x + attend(x))
        feed = keras.layers.Dense(width)(keras.layers.Dense(width, activation="relu")(x))
        x = keras.layers.LayerNormalization(epsilon=1e-6)(x + feed)
        x = keras.layers.Dense(20, activation="relu")(keras.layers.GlobalAveragePooling1D()(x))
        model = keras.Model(ids, keras.layers.Dense(2, activation="softmax")(x))
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    keras.utils.set_random_seed(0)
    layer = MultiHeadAttention(width, heads)
    own = keras.layers.MultiHeadAttention(heads, width // heads, use_bias=False)
    ours, theirs = classifier(lambda x: layer(x, x, x)), classifier(lambda x: own(x, x))
    for ours_part, their_part in zip(ours.layers, theirs.layers, strict=True):
        weights = ours_part.get_weights()
        if their_part is own:  # its heads have an axis of their own
            kernels = [getattr(layer, name).kernel.numpy() for name in ("W_q", "W_k", "W_v", "W_o")]
            weights = [x.reshape(target.shape) for x, target in zip(kernels, own.weights, strict=True)]
        their_part.set_weights(weights)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, vocabulary, (batch, tokens), np.int32), rng.integers(0, 2, batch, np.int32)

    def gradients(model: Any) -> list[Any]:
        # Gradients of the parts before and after the attention, which pass through it.
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        first, last = model.trainable_variables[0], model.trainable_variables[-1]
        return [loss, *map(tf.convert_to_tensor, tape.gradient(loss, [first.value, last.value]))]

    models = ours, theirs
    compared = _pair(lambda model: functools.partial(gradients, model), models)
    timed = _pair(lambda model: functools.partial(model.train_on_batch, x, y), models)
    return replace(timed, compared=(compared.ours, compared.theirs))


def _jax_gpt(*, batch: int, tokens: int, layers: int, heads: int, width: int) -> Pair:
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0])))

    def block() -> dict[str, Any]:
        up, down = matrix(width, 4 * width), matrix(4 * width, width)
        return {"project": matrix(width, 3 * width), "out": matrix(width, width), "up": up, "down": down}

    parameters = {
        "tokens": matrix(_VOCABULARY, width), "positions": matrix(tokens, width), "logits": matrix(width, _VOCABULARY),
        "blocks": [block() for _ in range(layers)],
    }  # fmt: skip
    ids, labels = rng.integers(0, _VOCABULARY, (2, batch, tokens))

    def normalized(x: Any) -> Any:
        return jax.nn.standardize(x, epsilon=1e-5)

    def loss(attention: Any, parameters: Any, ids: Any, labels: Any) -> Any:
        x = parameters["tokens"][ids] + parameters["positions"]
        for block in parameters["blocks"]:
            arrays = jnp.split((normalized(x) @ block["project"]).reshape(batch, tokens, 3 * heads, -1), 3, axis=2)
            x = x + attention(*arrays).reshape(x.shape) @ block["out"]
            x = x + jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]
        log_p = jax.nn.log_softmax(normalized(x) @ parameters["logits"])
        return -jnp.take_along_axis(log_p, labels[..., None], axis=-1).mean()

    # Both take (batch, token, head, dim).
    ours = functools.partial(ats.attend, mask=ats.Causal(), head_axis=-2)
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)

    def side(attention: Any) -> Run:
        step = jax.jit(jax.value_and_grad(functools.partial(loss, attention)))
        wait: Run = jax.block_until_ready
        return lambda: jax.tree.leaves(wait(step(parameters, ids, labels)))

    return Pair(side(ours), side(theirs))


MODELS: dict[str, Callable[..., Pair]] = {
    "model-translation": _translation,
    "model-translation-prepared": _translation,
    "model-gpt": _gpt,
    "model-gpt-dropout": _gpt,
    "model-encoder-padded": _padded_encoder,
    "model-encoder-packed": _padded_encoder,
    "model-encoder-window": _window_encoder,
    "model-minilm": _minilm,
    "model-llama-generate": _llama,
    "model-keras-classifier": _keras_classifier,
    "model-jax-gpt": _jax_gpt,
}
"""Builders by the name of a case, whose sizes are their keywords."""
