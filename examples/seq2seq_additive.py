"""Sequence to sequence with additive attention: read a date as people write it, and write it as 2026-11-25.

An encoder reads the letters; the state of a decoder is the query of every step, and the keys are projected once for all
steps. The model learns the alignment; seq2seq_additive.png shows it. ``--quick`` trains for seconds.
"""

import calendar
import sys

import torch
from torch import nn
from torch.nn import functional

from attnscore.layers.torch import AdditiveAttention
from attnscore.plotting import show_attention

STEPS = 20 if "--quick" in sys.argv else 200
LETTERS = "_ ,-0123456789abcdefghijklmnopqrstuvwxyz"  # the first is padding, and begins a date
MONTHS = [name.lower() for name in calendar.month_name[1:]]
torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other
torch.manual_seed(0)


def codes(texts, width):
    return torch.tensor([[LETTERS.index(letter) for letter in text.ljust(width, "_")] for text in texts])


def dates(count):
    """Return the dates in free form, their numbers of letters, and the dates as YYYY-MM-DD."""
    numbers = zip(
        *(torch.randint(*ends, (count,)).tolist() for ends in ((1950, 2050), (12,), (1, 29), (3,))), strict=True
    )
    read, written = [], []
    for year, month, day, form in numbers:
        name = MONTHS[month]
        read.append((f"{day} {name} {year}", f"{name} {day}, {year}", f"{name[:3]} {day} {year}")[form])
        written.append(f"{year}-{month + 1:02}-{day:02}")
    return codes(read, 18), torch.tensor([len(text) for text in read]), codes(written, 10)


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.encoder = nn.GRU(width, width // 2, bidirectional=True, batch_first=True)
        self.decoder = nn.GRUCell(2 * width, width)
        self.attention = AdditiveAttention(32, query_size=width, key_size=width)
        self.out = nn.Linear(2 * width, len(LETTERS))

    def forward(self, source, lens, target=None):
        memory, _ = self.encoder(self.letters(source))
        keys = self.attention.prepare_keys(memory)  # W_k once, for all steps
        state, letter = memory.new_zeros(len(source), memory.shape[-1]), source.new_zeros(len(source))
        logits, alignment = [], []
        for step in range(10):
            context = self.attention(state[:, None], keys, memory, valid_lens=lens)[:, 0]
            alignment.append(self.attention.attention_weights[:, 0])  # of this step
            state = self.decoder(torch.cat([self.letters(letter), context], -1), state)
            logits.append(self.out(torch.cat([state, context], -1)))
            letter = logits[-1].argmax(-1) if target is None else target[:, step]
        return torch.stack(logits, 1), torch.stack(alignment, 1)


model = Model()
optimiser = torch.optim.Adam(model.parameters(), lr=0.005)
for _ in range(STEPS):
    source, lens, target = dates(64)
    loss = functional.cross_entropy(model(source, lens, target)[0].flatten(0, 1), target.flatten())
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
with torch.no_grad():
    source, lens, target = dates(200)
    logits, alignment = model(source, lens)  # without targets it reads its own letters
padding = (torch.arange(18) >= lens[:, None, None]).expand_as(alignment)
print(f"{(logits.argmax(-1) == target).all(-1).double().mean():.0%} of new dates right")
print(f"weight on padding: {alignment[padding].sum():.1f}")
read, written = ([LETTERS[i] for i in x] for x in (source[0, : lens[0]], logits[0].argmax(-1)))
show_attention(alignment[0, :, : lens[0]], written, read).savefig("seq2seq_additive.png", dpi=120)
