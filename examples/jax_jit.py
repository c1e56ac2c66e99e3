"""`attend` in place of D2L's attention inside `jax.jit`: the same numbers, without the matrix of scores.

Arrays are (batch, length, heads, dim), as in JAX's own function. Lengths are traced: one program serves all batches.
"""

import jax
import jax.numpy as jnp

import attnscore as ats


def textbook(query, key, value, lens):
    """Scaled dot product of padded sequences; a position attends to itself and to earlier positions."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    positions = jnp.arange(key.shape[1])
    seen = (positions <= positions[:, None]) & (positions < lens[:, None, None, None])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), where=seen)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def ours(query, key, value, lens):
    return ats.attend(query, key, value, mask=ats.Causal(), valid_lens=lens, head_axis=-2)


def step(attention):
    """Return a compiled function that computes a loss and its gradients."""
    return jax.jit(jax.value_and_grad(lambda arrays, lens: (attention(*arrays, lens) ** 2).mean()))


def arrays_of(batch, length, heads=4, dim=32):
    return [jax.random.normal(key, (batch, length, heads, dim)) for key in jax.random.split(jax.random.key(0), 3)]


arrays, lens = arrays_of(batch=3, length=200), jnp.array([200, 77, 1])
results = [step(attention)(arrays, lens) for attention in (textbook, ours)]
largest = jax.tree.map(lambda x, y: float(abs(x - y).max() / abs(x).max()), *results)
print("loss and gradients agree:", all(error < 1e-5 for error in jax.tree.leaves(largest)))

# A sequence that is all padding, and NaN in it: 0 times NaN is NaN in D2L's product. Here it does not propagate.
bad = [x.at[2].set(jnp.nan) for x in arrays]
for attention in (textbook, ours):
    loss, _ = step(attention)(bad, jnp.array([200, 77, 0]))
    print(f"{attention.__name__:<9} loss with NaN in a sequence of length 0:", "NaN" if jnp.isnan(loss) else "finite")

for length in (1024, 4096):
    long, all_of_it = arrays_of(batch=1, length=length), jnp.array([length])
    for attention in (textbook, ours):
        memory = step(attention).lower(long, all_of_it).compile().memory_analysis().temp_size_in_bytes
        print(
            f"{attention.__name__:<9} {length} tokens, forward and backward: {memory / 2**20:7.1f} MB of scratch memory"
        )

# Scores are pytrees: their arrays train like any other.
shapes = (16,), (16, 32), (16, 32)
score = ats.Additive(*(0.2 * jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)))
loss = jax.jit(lambda score: (ats.attend(*arrays, score=score, valid_lens=lens, head_axis=-2) ** 2).mean())
print(f"an additive score: loss {loss(score):.4f}", end=" ")
for _ in range(5):
    score = jax.tree.map(lambda x, grad: x - 5.0 * grad, score, jax.grad(loss)(score))
print(f"and after 5 steps {loss(score):.4f}")

# One program for the gradients of every example, and dropout by a key of its own for each.
keys = jax.random.split(jax.random.key(2), 3)
each = jax.jit(jax.vmap(jax.grad(lambda q, k, v, key: ats.attend(q, k, v, dropout=0.1, seed=key, head_axis=-2).sum())))
print("gradients per example:", each(*(x[:, None] for x in arrays), keys).shape)
