"""Train additive attention in plain TensorFlow to write CamelCase names in snake_case, and plot its weights.

An encoder reads ``HttpError``, padded to 16 characters; a decoder writes ``http_error``, one character after the other.
The state of the decoder is the query: attention finds the characters to read next. ``--quick`` trains for a few steps.
"""

import sys

import numpy as np
import tensorflow as tf
from text_pairs import BEGIN, PAD, VOCABULARY, decode, text_pairs

import attnscore as ats
from attnscore.plotting import show_attention

tf.random.set_seed(0)
steps, batch, width = (20 if "--quick" in sys.argv else 900), 64, 64
shapes = {
    "letters": (len(VOCABULARY), width), "places": (16, width), "near": (5, width, width),
    "written": (len(VOCABULARY), width), "into": (width, 3 * width), "onward": (width, 3 * width),
    "W_q": (width, width), "W_k": (width, width), "w_v": (width,), "out": (2 * width, len(VOCABULARY)),
}  # fmt: skip
p = {name: tf.Variable(tf.random.normal(shape, stddev=shape[0] ** -0.5)) for name, shape in shapes.items()}
optimizer, score = tf.keras.optimizers.Adam(4e-3), ats.Additive(p["w_v"], p["W_q"], p["W_k"])


def encode(source):
    """Return features of each character and its neighbours."""
    return tf.tanh(tf.nn.conv1d(tf.gather(p["letters"], source) + p["places"], p["near"], 1, "SAME"))


def states(given):
    """Return the states of a gated recurrent unit over the characters written so far."""
    state, found = tf.zeros((tf.shape(given)[0], width)), []
    for x in tf.unstack(tf.gather(p["written"], given) @ p["into"], axis=1):
        reset, update, new = tf.split(x, 3, -1)
        reset_by, update_by, new_by = tf.split(state @ p["onward"], 3, -1)
        update = tf.sigmoid(update + update_by)
        state = update * state + (1 - update) * tf.tanh(new + tf.sigmoid(reset + reset_by) * new_by)
        found.append(state)
    return tf.stack(found, 1)


@tf.function
def next_letters(source, lens, given):
    """Return the logits of the next character after each character in `given`."""
    memory, state = encode(source), states(given)
    context = ats.attend(state, memory, memory, valid_lens=lens, score=score)
    return tf.concat([state, context], -1) @ p["out"]


@tf.function
def train_step(source, lens, given, target):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, next_letters(source, lens, given))
        loss = tf.reduce_mean(losses[target != PAD])
    optimizer.apply_gradients(zip(tape.gradient(loss, list(p.values())), p.values(), strict=True))
    return loss


train, test = text_pairs()
for step, rows in enumerate(np.random.default_rng(0).integers(len(train.source), size=(steps, batch)), 1):
    loss = train_step(*(x[rows] for x in train[:4]))
    if step % 100 == 0:
        print(f"step {step}: loss {loss:.3f}")

given = np.where(np.arange(test.given.shape[1]) == 0, BEGIN, PAD) + np.zeros_like(test.given)
for i in range(given.shape[1] - 1):
    given[:, i + 1] = np.argmax(next_letters(test.source, test.source_lens, given), -1)[:, i]
written = [decode(row[1:]) for row in given]
right = np.mean([word == decode(target) for word, target in zip(written, test.target, strict=True)])
print(f"names of the test set written without a fault: {right:.0%}")
weights = ats.attention_weights(states(given), encode(test.source), valid_lens=test.source_lens, score=score).numpy()
print("weight on padding:", (weights * (test.source == PAD)[:, None]).sum())
row = test.source_lens.argmax()
read, wrote = decode(test.source[row]), written[row] + ">"
figure = show_attention(weights[row, : len(wrote), : len(read)], wrote, read, xlabel="read", ylabel="written")
figure.savefig("alignment.png")
print(f"alignment.png shows {read} -> {written[row]}")
