"""Train additive attention in MXNet to write CamelCase names in snake_case, and plot its weights.

An encoder reads ``HttpError``, padded to 16 characters; a decoder writes ``http_error``. The state of
the decoder is the query: attention finds the characters to read next. ``--quick`` trains for a few steps.
"""

import sys

import mxnet as mx
import numpy as onp
from mxnet import autograd, gluon, np, npx
from text_pairs import BEGIN, PAD, VOCABULARY, decode, text_pairs

from attnscore.layers.mxnet import AdditiveAttention
from attnscore.plotting import show_heatmaps

npx.set_np()
mx.random.seed(0)
steps, batch, width = 10 if "--quick" in sys.argv else 800, 64, 64


class Model(gluon.Block):
    def __init__(self):
        super().__init__()
        self.letters, self.written = (gluon.nn.Embedding(len(VOCABULARY), width) for _ in "rw")
        self.encoder, self.decoder = (gluon.rnn.GRU(width, layout="NTC", input_size=width) for _ in "rw")
        self.attention = AdditiveAttention(width, dropout=0.1)
        self.out = gluon.nn.Dense(len(VOCABULARY), flatten=False)

    def forward(self, source, source_lens, given):
        memory, state = self.encoder(self.letters(source)), self.decoder(self.written(given))
        context = self.attention(state, memory, memory, source_lens)
        return self.out(np.concatenate([state, context], -1))


def arrays(words):
    return [np.array(x) for x in words]  # float32, lengths too: MXNet's way


def write(model, words):  # each character follows those that the model wrote
    given = onp.full_like(words.given, BEGIN)
    for i in range(given.shape[1] - 1):
        scores = model(*arrays([words.source, words.source_lens, given]))
        given[:, i + 1] = scores[:, i].argmax(-1).asnumpy()
    return given


train, test = text_pairs()
model, rng = Model(), onp.random.default_rng(0)
model.initialize(mx.init.Xavier())
trainer = gluon.Trainer(model.collect_params(), "adam", {"learning_rate": 4e-3})
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(steps):
    rows = rng.integers(len(train.source), size=batch)
    source, lens, given, target = arrays(x[rows] for x in train[:4])
    seen = np.expand_dims(target != PAD, -1).astype("float32")
    with autograd.record():
        loss = cross_entropy(model(source, lens, given), target, seen).sum() / seen.sum()
    loss.backward()
    trainer.step(1)
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3f}")

given = write(model, test)
right = onp.mean([decode(row[1:]) == decode(target) for row, target in zip(given, test.target, strict=True)])
print(f"names of the test set written without a fault: {right:.0%}")
weights = model.attention.attention_weights.asnumpy()
print("weight on padding:", float((weights * (test.source == PAD)[:, None]).sum()))
row = test.source_lens.argmax()
read, wrote = decode(test.source[row]), decode(given[row, 1:]) + ">"
figure = show_heatmaps(weights[row, : len(wrote), : len(read)], "read", "written", figsize=(6, 6))
figure.axes[0].set_xticks(range(len(read)), read)
figure.axes[0].set_yticks(range(len(wrote)), wrote)
figure.savefig("mxnet_alignment.png")
print(f"mxnet_alignment.png shows {read} -> {wrote}")
