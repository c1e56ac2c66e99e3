"""Train a Keras model to write CamelCase names in snake_case, and plot its weights.

The names are from the sources of Python's standard library. An encoder reads the padded letters. The state of a decoder
is the query of ``AdditiveAttention``. The masks that exclude padding come from the embeddings automatically.
It runs on any of Keras's backends: ``KERAS_BACKEND=torch python keras_alignment.py``. ``--quick`` trains for seconds.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notes on the machine

import keras
import numpy as np
from text_pairs import VOCABULARY, decode, text_pairs

from attnscore.layers.keras import AdditiveAttention
from attnscore.plotting import show_attention

QUICK = "--quick" in sys.argv
keras.utils.set_random_seed(0)
train, test = text_pairs(longest=16)
if QUICK:
    train = type(train)(*(x[:512] for x in train))


def embedding(width=32):
    return keras.layers.Embedding(len(VOCABULARY), width, mask_zero=True)


source, given = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
read = keras.layers.Bidirectional(keras.layers.GRU(32, return_sequences=True))(embedding()(source))
state = keras.layers.GRU(64, return_sequences=True)(embedding()(given))
attention = AdditiveAttention(num_hiddens=64)
looked = attention([state, read])  # Keras's own [query, value]
hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()([looked, state]))
model = keras.Model([source, given], keras.layers.Dense(len(VOCABULARY))(hidden))

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.005), loss)


def right(pairs):
    """Return the share of names in which the most probable letter is right at every place."""
    guess = model.predict([pairs.source, pairs.given], batch_size=256, verbose=0).argmax(-1)
    return np.mean([decode(a) == decode(b) for a, b in zip(guess, pairs.target, strict=True)])


print(f"Keras on {keras.backend.backend()}; untrained: {right(test):.0%} of new names right")
for epoch in range(1 if QUICK else 8):
    rows = model.fit([train.source, train.given], train.target, batch_size=64, epochs=1, verbose=0)
    print(f"epoch {epoch + 1}: loss {rows.history['loss'][0]:.3f}, {right(test):.0%} of new names right")

# Only an eager call keeps its weights; calls inside fit and predict keep nothing.
model([test.source[:4], test.given[:4]])
weights = keras.ops.convert_to_numpy(attention.attention_weights)
padding = test.source[:4, None] == 0
print(f"weight on padding: {(weights * padding).sum():.1f}")
for i in range(4):
    name, written = decode(test.source[i]), decode(test.target[i])
    best = weights[i, : len(written)].argmax(-1)
    print(f"{name} -> {written}: looks at {''.join(name[j] for j in best)}")
longest = int(test.source_lens[:4].argmax())
name, written = decode(test.source[longest]), [*decode(test.target[longest]), "end"]
block = weights[longest, : len(written), : len(name)]
figure = show_attention(block, written, list(name), xlabel="letters read", ylabel="letters written")
figure.savefig("keras_alignment.png", dpi=120)
