"""A pointer network sorts: given a number, it points at the next larger one of a list of any length.

The attention weights are the output distribution: no values, no vocabulary, one additive score with a bias. Padding and
places that were already chosen are masked, so every answer is a permutation. ``--quick`` trains for seconds.
"""

import sys

import torch
from torch.nn import Parameter, functional

import attnscore as ats

STEPS, LONGEST = 100 if "--quick" in sys.argv else 400, 10
torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other


def problems(count):
    """Return different numbers in any order, how many there are, the places that sort them, and which are real."""
    numbers = torch.rand(count, 20).argsort(-1)[:, :LONGEST] / 20
    lens = torch.randint(2, LONGEST + 1, (count,))
    real = torch.arange(LONGEST) < lens[:, None]
    return numbers[..., None], lens, numbers.masked_fill(~real, 9.0).argsort(-1), real


def asked(numbers, order):
    """Return the number before each answer, which is the query. Before the smallest comes -0.05."""
    return functional.pad(numbers.take_along_dim(order[..., None], 1)[:, :-1], (0, 0, 1, 0), value=-0.05)


torch.manual_seed(0)
starts = (torch.randn(32), 10 * torch.randn(32, 1), 10 * torch.randn(32, 1), torch.randn(32))
pointer = ats.Additive(*map(Parameter, starts))  # w_v, W_q, W_k, bias
optimiser = torch.optim.Adam([pointer.w_v, pointer.W_q, pointer.W_k, pointer.bias], lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, STEPS)
for _ in range(STEPS):
    numbers, lens, order, real = problems(64)
    scores = ats.attention_scores(asked(numbers, order), numbers, score=pointer, valid_lens=lens)  # -inf on padding
    loss = functional.cross_entropy(scores[real], order[real])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()

with torch.no_grad():
    numbers, lens, order, real = problems(500)
    free, query, answers = real.clone(), torch.full((500, 1, 1), -0.05), []
    for _ in range(LONGEST):
        weights = ats.attention_weights(query, numbers, score=pointer, mask=free[:, None])  # (batch, 1, place)
        place = weights.argmax(-1)
        free.scatter_(1, place, False)
        query = numbers.take_along_dim(place[..., None], 1)
        answers.append(place)
    answers = torch.cat(answers, dim=1)
    weights = ats.attention_weights(asked(numbers, order), numbers, score=pointer, valid_lens=lens)
right = (weights.argmax(-1) == order)[real].double().mean()
whole = ((answers == order) | ~real).all(-1).double().mean()
sorted_places = answers.sort(-1).values == torch.arange(LONGEST)
print(f"pointers right: {right:.0%}; whole lists sorted: {whole:.0%}")
print("every answer of a full list is a permutation:", bool(sorted_places[lens == LONGEST].all()))
print("probability of padding:", weights[~real[:, None].expand_as(weights)].sum().item())
first = int((lens == LONGEST).nonzero()[0])
print("a list:", [f"{x:.2f}" for x in numbers[first, :, 0].tolist()])
print("sorted:", [f"{x:.2f}" for x in numbers[first, answers[first], 0].tolist()])
