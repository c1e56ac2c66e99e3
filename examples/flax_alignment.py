"""Train additive attention in Flax to write CamelCase names in snake_case, and plot its weights.

An encoder reads ``HttpError``, padded to 16 characters; a decoder writes ``http_error``. The state of
the decoder is the query: attention finds the characters to read next. ``--quick`` trains for a few steps.
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from text_pairs import BEGIN, PAD, VOCABULARY, decode, text_pairs

from attnscore.layers.flax import AdditiveAttention
from attnscore.plotting import show_heatmaps

steps, batch, width = 10 if "--quick" in sys.argv else 800, 64, 64


class Model(nnx.Module):
    def __init__(self, rngs):
        self.letters, self.written = (nnx.Embed(len(VOCABULARY), width, rngs=rngs) for _ in "rw")
        self.encoder, self.decoder = (nnx.RNN(nnx.GRUCell(width, width, rngs=rngs)) for _ in "rw")
        self.attention = AdditiveAttention(width, dropout=0.1, query_size=width, key_size=width, rngs=rngs)
        self.out = nnx.Linear(2 * width, len(VOCABULARY), rngs=rngs)

    def __call__(self, source, source_lens, given):
        memory, state = self.encoder(self.letters(source)), self.decoder(self.written(given))
        context = self.attention(state, memory, memory, source_lens)
        return self.out(jnp.concatenate([state, context], -1))


@nnx.jit
def train_step(model, optimizer, source, source_lens, given, target):
    def loss(model):
        scores = model(source, source_lens, given)
        return optax.softmax_cross_entropy_with_integer_labels(scores, target).mean(where=target != PAD)

    found, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return found


@nnx.jit
def next_letters(model, source, source_lens, given):
    return model(source, source_lens, given).argmax(-1)


def write(model, words):  # each character follows those that the model wrote
    given = np.full_like(words.given, BEGIN)
    for i in range(given.shape[1] - 1):
        given[:, i + 1] = next_letters(model, words.source, words.source_lens, given)[:, i]
    return given


train, test = text_pairs()
model, rng = Model(nnx.Rngs(0)), np.random.default_rng(0)
optimizer = nnx.Optimizer(model, optax.adam(4e-3), wrt=nnx.Param)
for step in range(steps):
    rows = rng.integers(len(train.source), size=batch)
    loss = train_step(model, optimizer, *(x[rows] for x in train[:4]))
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss:.3f}")

model.eval()
given = write(model, test)
right = np.mean([decode(row[1:]) == decode(target) for row, target in zip(given, test.target, strict=True)])
print(f"names of the test set written without a fault: {right:.0%}")
model(test.source, test.source_lens, given)  # outside of jit, inside which no weights are kept
weights = model.attention.attention_weights
print("weight on padding:", float((weights * (test.source == PAD)[:, None]).sum()))
row = test.source_lens.argmax()
read, wrote = decode(test.source[row]), decode(given[row, 1:]) + ">"
figure = show_heatmaps(weights[row, : len(wrote), : len(read)], "read", "written", figsize=(6, 6))
figure.axes[0].set_xticks(range(len(read)), read)
figure.axes[0].set_yticks(range(len(wrote)), wrote)
figure.savefig("alignment.png")
print(f"alignment.png shows {read} -> {wrote}")
