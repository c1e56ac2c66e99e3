"""Location-sensitive attention (Tacotron 2): a decoder that reads every symbol once, in order, for all its frames.

A symbol lasts 2 to 4 frames and may occur again, so only the place of the last step tells which symbol is next. The
keys are prepared once for a batch. In each step the weights of earlier steps are convolved and added to the keys as a
term of the additive score. Without this term the decoder does not know where it is. ``--quick`` trains for seconds.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import attnscore as ats

STEPS = 60 if "--quick" in sys.argv else 400
SYMBOLS, LENGTH, WIDTH, HIDDEN = 6, 8, 32, 32
torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other


class Decoder(nn.Module):
    """A GRU that names the symbol of each frame, and whether it is the symbol's last frame."""

    def __init__(self, located):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.cell = nn.GRUCell(WIDTH + 1, WIDTH)
        self.W_q, self.W_k = (nn.Parameter(torch.randn(HIDDEN, WIDTH) / WIDTH**0.5) for _ in "qk")
        self.w_v = nn.Parameter(torch.randn(HIDDEN) / HIDDEN**0.5)
        self.conv, self.W_f = nn.Conv1d(2, 8, 7, padding=3, bias=False), nn.Linear(8, HIDDEN, bias=False)
        self.out, self.located = nn.Linear(WIDTH, SYMBOLS), located

    def forward(self, symbols, is_last):
        memory = self.embedding(symbols)
        prepared = ats.prepare_keys(ats.Additive(self.w_v, self.W_q, self.W_k), memory)  # once for all frames
        state = memory.new_zeros(len(symbols), WIDTH)
        # Before the first step all weight is on the first symbol, and the sum of earlier weights is 0.
        weights = functional.one_hot(torch.zeros(len(symbols), 1, dtype=torch.int64), LENGTH).to(memory.dtype)
        total, logits, alignment = torch.zeros_like(weights), [], []
        for frame in range(is_last.shape[1]):
            places = self.W_f(self.conv(torch.cat([weights, total], 1)).transpose(1, 2))  # (batch, key, HIDDEN)
            keys = prepared + places if self.located else prepared
            context, weights = ats.attend(state[:, None], keys, memory, return_weights=True)
            total = total + weights
            state = self.cell(torch.cat([context[:, 0], is_last[:, frame, None]], -1), state)
            logits.append(self.out(context[:, 0]))
            alignment.append(weights[:, 0])
        return torch.stack(logits, 1), torch.stack(alignment, 1)


def batch(size):
    """Return symbols, which frames are a symbol's last, and the position of the symbol of each frame."""
    symbols, frames = torch.randint(SYMBOLS, (size, LENGTH)), torch.randint(2, 5, (size, LENGTH))
    ends = frames.cumsum(1)
    place = (torch.arange(2 * LENGTH) >= ends[:, :, None]).sum(1)  # as many frames as all have
    is_last = (torch.arange(1, 2 * LENGTH + 1) == ends[:, :, None]).any(1)
    return symbols, is_last.float(), place


for located in (False, True):
    torch.manual_seed(0)
    decoder = Decoder(located)
    optimiser = torch.optim.Adam(decoder.parameters(), lr=0.01)
    for _ in range(STEPS):
        symbols, is_last, place = batch(32)
        logits, _ = decoder(symbols, is_last)
        loss = functional.cross_entropy(logits.flatten(0, 1), symbols.gather(1, place).flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        symbols, is_last, place = batch(200)
        logits, alignment = decoder(symbols, is_last)
    right = (logits.argmax(-1) == symbols.gather(1, place)).double().mean()
    there = alignment.gather(2, place[..., None]).mean()
    print(f"{'with' if located else 'without'} location: {right:.0%} of frames right, weight on the symbol {there:.2f}")
