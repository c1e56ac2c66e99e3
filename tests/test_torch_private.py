"""Private names of PyTorch: read in one file, and a release without one of them computes the same."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attnscore as ats
from attnscore.backends import torch_private as private
from attnscore.diagnostics import watch
from attnscore.layers.torch import AdditiveAttention
from renamed import replace_names, run_without, take_away

FILE = Path(private.__file__)
SOURCE = FILE.read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r'"(torch\.[\w.]+)"', SOURCE)))
# Documented for subclasses and modules, or older than the package.
ALLOWED = {"_make_wrapper_subclass", "_version", "_modules", "_parameters", "_compiled_call_impl"}


@pytest.fixture(params=[*(pytest.param([name], marks=pytest.mark.slow) for name in NAMES), NAMES], ids=[*NAMES, "all"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that a release of PyTorch does not have, with their replacements in the module."""
    take_away(private, request.param, monkeypatch)
    return list(request.param)


def test_nothing_is_missing_here() -> None:
    assert len(NAMES) > 15
    assert ats.available()["fallbacks"] == private.FALLBACKS == {}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch, at the first jvp
def test_a_missing_name_changes_no_result(missing: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    lens = torch.tensor([1, 3])

    def define(q: Any, k: Any, v: Any, lens: Any = lens) -> Any:
        scores = (q @ k.mT / 2).masked_fill(torch.arange(3) >= lens[..., None, None], -torch.inf)
        return scores.softmax(-1) @ v

    def attend(*arrays: Any, lens: Any = lens) -> Any:
        return ats.attend(*arrays, valid_lens=lens)

    for _ in range(2):
        torch.testing.assert_close(attend(q, k, v), define(q, k, v))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        got, expected = (torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (attend, define))
        torch.testing.assert_close(got, expected)
    small = [x[:1, :2].clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradgradcheck(ats.attend, small)
    for transform in (
        lambda f: torch.func.vmap(lambda q, k, v, n: f(q[None], k[None], v[None], lens=n[None]))(q, k, v, lens),
        lambda f: torch.func.grad(lambda q: f(q, k, v).square().sum())(q),
        # A model closed over: nothing that is passed is wrapped.
        lambda f: torch.func.grad(lambda x: (x * f(q, k, v)).sum())(v),
        lambda f: torch.func.jvp(f, (q, k, v), (k, v, q)),
        lambda f: torch.func.vmap(torch.func.grad(lambda q: f(q, k, v).square().sum()))(torch.stack([q, k])),
    ):
        torch.testing.assert_close(transform(attend), transform(define))
    with torch.autocast("cpu", torch.bfloat16):
        assert ats.attend(q.float(), k.float(), v.float()).dtype == torch.bfloat16
    assert ats.attend(*(x.to("meta") for x in (q, k, v))).shape == v.shape


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_missing_name_changes_no_layer(missing: list[str]) -> None:
    layer = AdditiveAttention(4, query_size=4, key_size=4)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    calls: list[Any] = []
    layer.W_k.register_forward_hook(lambda *arguments: calls.append(arguments))
    out = layer(x, x, x, torch.tensor([1, 3]))
    torch.testing.assert_close(out, layer.attention_weights @ x)
    assert len(calls) == 1
    if not any("torch.jit.trace refuses" in cost for cost in private.FALLBACKS.values()):
        traced = torch.jit.trace(ats.attend, (x, x, x), check_trace=False)
        torch.testing.assert_close(traced(x, x, x), ats.attend(x, x, x))


def test_a_missing_name_leaves_no_call_unwatched(missing: list[str]) -> None:
    model = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    is_fused = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), watch(model) as seen:
        model(torch.zeros(2, 3, 4))
    assert [row["layer"] for row in seen.last()] == ["self_attn"] * 2
    assert torch.backends.mha.get_fastpath_enabled() is is_fused


@pytest.mark.slow
def test_a_release_without_any_of_the_names_is_imported(tmp_path: Path) -> None:
    """With the backend made from the fallbacks alone, in a new process, calls are compiled too, by graph breaks."""
    (tmp_path / "edited.py").write_text(replace_names(SOURCE, NAMES))
    code = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("attnscore.backends.torch_private", "edited.py")
module = importlib.util.module_from_spec(spec)
sys.modules["attnscore.backends.torch_private"] = module
spec.loader.exec_module(module)
import attnscore, attnscore.backends
attnscore.backends.torch_private = module
x = torch.randn(1, 3, 4)
out = attnscore.attend(x, x, x)
torch.testing.assert_close(torch.compile(lambda x: attnscore.attend(x, x, x), backend="eager")(x), out)
assert len(attnscore.available()["fallbacks"]) == len(module.FALLBACKS) > 15
"""
    path = os.pathsep.join([str(FILE.parents[2]), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize(
    "names", [*(pytest.param([name], marks=pytest.mark.slow) for name in NAMES), NAMES], ids=[*NAMES, "all"]
)
def test_a_renamed_name_leaves_right_gradients_and_is_listed(names: list[str]) -> None:
    calls = """
import torch, attnscore
arrays = [torch.randn(2, 5, 4, dtype=torch.float64) for _ in range(3)]
lens = torch.tensor([2, 5])
def define(q, k, v):
    return (q @ k.mT / 2).masked_fill(torch.arange(5) >= lens[:, None, None], -torch.inf).softmax(-1) @ v
for _ in range(2):
    results = []
    for function in (lambda *x: attnscore.attend(*x, valid_lens=lens), define):
        leaves = [x.clone().requires_grad_() for x in arrays]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results)
"""
    run_without("torch", names, calls)


def private_names(path: Path) -> Iterator[str]:
    """Private names that a file reads of modules of PyTorch, or imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch."):
                    roots.add(alias.asname or "torch")
                    yield from (part for part in alias.name.split(".") if part.startswith("_"))
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            roots |= {alias.asname or alias.name for alias in node.names}
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if part.startswith("_"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in roots:
                yield node.attr


def test_private_names_are_read_in_one_file() -> None:
    others = [path for path in FILE.parents[1].rglob("*.py") if path != FILE and "torch" in path.read_text("utf-8")]
    wrong = {path.name: names for path in others if (names := set(private_names(path)) - ALLOWED)}
    assert not wrong
    assert set(private_names(FILE)) == set()  # by their paths alone
