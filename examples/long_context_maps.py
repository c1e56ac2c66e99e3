"""Attention over a long context, without its matrix: a sink, a window along the diagonal, documents on a few topics.

The program makes queries and keys with these three patterns and finds the patterns again. It takes 8192 tokens, or the
number in its first argument (131072 take about a minute on two cores); a second argument names a picture:
``python examples/long_context_maps.py 131072 map.png``.
"""

import sys

import numpy as np

import attnscore as ats


def made_up_head(tokens, documents=24, topics=6, seed=0):
    """Queries and keys (tokens, 64) that attend to the first key, their neighbours and documents on their topic."""
    rng = np.random.default_rng(seed)
    angles = np.arange(tokens)[:, None] * np.geomspace(np.pi / 8, np.pi / 4096, 16)
    place = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)  # place . place falls with the distance
    ends = np.sort(rng.choice(np.arange(1, tokens), documents - 1, replace=False))
    document = np.searchsorted(ends, np.arange(tokens), side="right")
    topic = rng.integers(0, topics, documents)[document]
    subjects = rng.standard_normal((topics, 16))
    subject = (subjects / np.linalg.norm(subjects, axis=1, keepdims=True))[topic]
    both = np.concatenate([np.sqrt(3.5) * place, np.sqrt(24) * subject, np.zeros((tokens, 16))], axis=1)
    query, key = (both + rng.standard_normal(both.shape) / 4 for _ in range(2))
    query[:, 48] = 8.0
    key[0, 48] = 11.0
    return query.astype(np.float32), key.astype(np.float32), topic


def main(tokens, picture=None):
    """Print each pattern of the inputs as the maps show it."""
    query, key, topic = made_up_head(tokens)
    causal = {"mask": ats.Causal()}

    mass = ats.key_mass(query, key, **causal)
    print(f"{tokens} tokens; one float32 matrix would take {4e-6 * tokens**2:,.0f} MB")
    print("heaviest key:", mass.argmax(), "- more than 100 times any other:", bool(mass[0] > 100 * mass[1:].max()))
    print("all weights sum to the number of queries:", bool(abs(mass.sum(dtype=float) / tokens - 1) < 1e-4))

    found = ats.top_weights(query, key, 4, **causal)
    distance = np.arange(tokens)[:, None] - found.index
    near = (found.index == 0) | (distance < 64)
    print(f"4 largest weights of each query on the sink or 64 neighbours: {near[4:].mean():.0%}")

    pooled = ats.pooled_weights(query, key, bins=(64, 64), **causal)
    of_bin = topic[:: -(-tokens // 64)]
    bins = np.arange(len(of_bin))
    far = (bins[:, None] - bins > 1) & (bins > 0)
    same = of_bin[:, None] == of_bin
    ratio = pooled[far & same].mean() / pooled[far & ~same].mean()
    print("a bin far away on the same topic weighs more than twice one on another:", bool(ratio > 2))

    middle = tokens // 2
    row = ats.attention_weights(query, key, query_index=middle, **causal)[0]
    print(
        "one exact row sums to 1:", bool(abs(row.sum() - 1) < 1e-5), "- its future is 0:", row[middle + 1 :].max() == 0
    )
    if picture:
        from attnscore import plotting

        plotting.show_long_attention(query, key, **causal).savefig(picture, dpi=140)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8192, *sys.argv[2:3])
