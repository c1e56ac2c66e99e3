"""Watch a head fail: as queries grow, logits grow, the softmax saturates, and no gradient comes back to the scores.

The statistics come from the pass that computes the output. The last rows show three remedies.
"""

import torch

import attnscore as ats

torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other
torch.manual_seed(0)
heads, length, dim = 4, 256, 64
query, key, value, probe = (torch.randn(1, heads, length, dim) for _ in range(4))
# The first queries have few keys, so they are saturated by nature: only the second half is shown.
late = slice(length // 2, None)


def row(name, growth, score):
    """Print statistics and gradient of a head whose queries are multiplied by `growth`."""
    nothing = torch.zeros(heads, length, length, requires_grad=True)  # its gradient is the gradient of the scores
    out, stats = ats.attend(growth * query, key, value, score=score, bias=nothing, mask=ats.Causal(), return_stats=True)
    (out * probe).sum().backward()
    numbers = (
        stats.var_score[..., late].mean(),
        stats.max_score[..., late].max(),
        stats.effective_keys()[..., late].mean(),
        stats.saturated(0.99)[..., late].double().mean(),
        stats.jacobian_trace()[..., late].mean(),
        nothing.grad[:, late].norm(dim=-1).median(),
    )
    print(f"{name:<26}" + "".join(f"{number.item():>11.3g}" for number in numbers))


columns = ("var(score)", "max score", "eff. keys", "saturated", "trace(J)", "gradient")
print(f"{'queries':<26}" + "".join(f"{column:>11}" for column in columns))
for growth in (0.5, 1, 4, 16, 64, 256):
    row(f"times {growth}", growth, "scaled_dot")
print()
row("times 256, soft cap 5", 256, ats.SoftCap("scaled_dot", 5.0))
row("times 256, temperature 256", 256, ats.Temperature("scaled_dot", 256.0))
row("times 256, cosine x 8", 256, ats.Cosine(scale=8.0))
