"""NumPy in two minutes: weights, padding, statistics and gradients, without any framework.

Run it with ``python examples/numpy_quickstart.py``; NumPy is all it needs.
"""

import numpy as np

import attnscore as ats

rng = np.random.default_rng(0)
query = rng.normal(size=(2, 3, 8))  # (batch, query, dim)
key = rng.normal(size=(2, 5, 8))  # (batch, key, dim)
value = rng.normal(size=(2, 5, 4))  # (batch, key, value_dim)

# Sequence 0 has two real keys, sequence 1 has four; the rest is padding.
out, weights, stats = ats.attend(query, key, value, valid_lens=[2, 4], return_weights=True, return_stats=True)
print("out", out.shape, "weights", weights.shape)
print("weights of sequence 0, query 0:", weights[0, 0].round(3))
print("weight on padding:", weights[0, :, 2:].sum() + weights[1, :, 4:].sum())
print("effective keys of each query:", stats.effective_keys().round(2).tolist())

# Padding may hold anything: it does not propagate.
key[0, 2:], value[0, 2:] = np.nan, np.inf
again = ats.attend(query, key, value, valid_lens=[2, 4])
print("NaN and infinity in the padding change nothing:", bool((again == out).all()))

# A score is an object; its arrays are its parameters.
score = ats.Additive(w_v=rng.normal(size=6), W_q=rng.normal(size=(6, 8)), W_k=rng.normal(size=(6, 8)))
mask = ats.ValidLens([2, 4]) & ats.Causal(align="top_left")
print(mask)
print(mask.materialize(3, 5, batch=2)[1].astype(int))

# NumPy has no autodiff, so attend_vjp returns the VJP as a function. A difference quotient agrees with it.
out, pullback = ats.attend_vjp(query, key, value, score=score, mask=mask)
grads = pullback(np.ones_like(out))
step = 1e-6
moved = np.eye(1, 6)[0] * step
up, down = (
    ats.attend(query, key, value, score=ats.Additive(w_v, score.W_q, score.W_k), mask=mask).sum()
    for w_v in (score.w_v + moved, score.w_v - moved)
)
print("gradient of w_v[0]:", round(float(grads.score["w_v"][0]), 6))
print("difference quotient:", round(float((up - down) / (2 * step)), 6))
