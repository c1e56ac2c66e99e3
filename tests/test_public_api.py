"""The public interface, name by name: what there is, its signature, and a docstring of numpydoc's shape.

The signatures are typed in here: they are a promise, so a change of one must be seen in this file too.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import operator
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnscore as ats
from attnscore import parallel
from attnscore.diagnostics import inspect_model
from attnscore.plotting import show_long_attention

_ATTEND = (
    "score='scaled_dot', mask=None, valid_lens=None, bias=None, sink=None, dropout=0.0, seed=None, head_axis=-3, "
    "normalizer='softmax', kernel='auto'"
)
_BLOCK = "(query, key, *, score='scaled_dot', mask=None, valid_lens=None, bias=None, sink=None, head_axis=-3, "
_INDEX = "query_index=None, key_index=None)"
_MAP = "*, score='scaled_dot', mask=None, valid_lens=None, bias=None, sink=None, head_axis=-3)"
FUNCTIONS = {
    "attend": f"(query, key, value, *, {_ATTEND}, return_weights=False, return_stats=False)",
    "attend_vjp": f"(query, key, value, *, {_ATTEND}, return_weights=False, return_stats=False)",
    "explain": f"(query, key, value, *, {_ATTEND}, return_weights=False, return_stats=False)",
    "attention_weights": f"{_BLOCK}normalizer='softmax', {_INDEX}",
    "attention_scores": _BLOCK + _INDEX,
    "top_weights": f"(query, key, k, {_MAP}",
    "pooled_weights": f"(query, key, bins=(64, 64), {_MAP}",
    "key_mass": f"(query, key, {_MAP}",
    "prepare_keys": "(score, key, *, head_axis=-3)",
    "masked_softmax": "(scores, valid_lens=None, *, mask=None, axis=-1, temperature=1.0)",
    "merge": "(outs, log_sum_exps)",
    "pack": "(sequences, axis=0)",
    "unpack": "(packed, cu, axis=0)",
    "pack_padded": "(padded, lens)",
    "unpack_padded": "(packed, cu, length=None)",
    "softmax_jacobian": "(weights)",
    "softmax_pullback": "(weights, grad)",
    "cost": "(score, *, query_len, key_len, dim, key_dim=None, value_dim=None, num_hiddens=None, heads=1, batch=1)",
    "register_score": "(name, cls)",
    "relative_buckets": "(positions, *, buckets=32, max_distance=128, bidirectional=True)",
    "relative_positions": "(query_len, key_len, *, offset=None)",
    "available": "()",
    "set_num_threads": "(n)",
    "get_num_threads": "()",
}
SCORES = {
    "Dot": "()",
    "ScaledDot": "(scale=None)",
    "Additive": "(w_v, W_q=None, W_k=None, bias=None, activation='tanh', negative_slope=0.01)",
    "Bilinear": "(W)",
    "Gaussian": "(bandwidth=1.0)",
    "Cosine": "(scale=1.0, unit_keys=False)",
    "Sum": "()",
    "SoftCap": "(score, cap)",
    "Temperature": "(score, temperature)",
    "Combination": "(scores, weights)",
}
MASKS = {
    "ValidLens": "(lens, query_lens=None)",
    "KeyRange": "(start, stop)",
    "KeyPadding": "(array)",
    "Causal": "(align=None, offset=None)",
    "SlidingWindow": "(left=None, right=None, align=None, offset=None)",
    "PrefixLM": "(prefix_lens)",
    "Documents": "(query_ids, key_ids=None)",
    "Packed": "(cu_query, cu_key=None, left=None, right=None, align=None)",
    "Neighbours": "(indptr, indices)",
    "Dense": "(array)",
    "MaskFunction": "(function, captured=(), heads=0)",
}
CLASSES = {
    "Entmax": "(alpha=1.5)",
    "KeyValueCache": "(*, score=None, window=None, sinks=0, head_axis=-3, capacity=None)",
    "PreparedKeys": "(key, score)",
    "TritonTile": "(of, value, gradient, parameters=(), channel_parameters=())",
}
METHODS = {
    "Mask.materialize": "(query_len, key_len, batch=1)",
    "KeyPadding.from_ignore": "(array)",
    "AttentionStats.jacobian_trace": "()",
    "AttentionStats.effective_keys": "()",
    "AttentionStats.summary": "()",
    "AttentionStats.saturated": "(threshold=0.99)",
}
TUPLES = {
    "AttentionStats": (
        *("log_sum_exp", "max_score", "mean_score", "var_score"),
        *("entropy", "max_weight", "sum_sq_weights", "sum_weights", "min_score", "argmax_key"),
    ),
    "Gradients": ("query", "key", "value", "bias", "sink", "score"),
    "TopWeights": ("weights", "index"),
    "Cost": ("operations", "bytes", "matrix_bytes", "parameters"),
}
ERRORS = (
    *("AttnscoreError", "ShapeError", "MaskError", "DtypeError", "DeviceError", "FrameworkError"),
    *("ArgumentError", "FileError", "KernelUnavailable"),
)
LAYERS = {
    "DotProductAttention": "(dropout=0.0, *, scaled=True, normalizer='softmax', keep_last=True)",
    "AdditiveAttention": (
        "(num_hiddens, dropout=0.0, *, key_size=None, query_size=None, normalizer='softmax', keep_last=True, ...)"
    ),
    "BilinearAttention": (
        "(dropout=0.0, *, key_size=None, query_size=None, normalizer='softmax', keep_last=True, ...)"
    ),
    "GaussianAttention": (
        "(bandwidth=1.0, dropout=0.0, *, learn_bandwidth=False, normalizer='softmax', keep_last=True, ...)"
    ),
    "MultiHeadAttention": (
        "(num_hiddens, num_heads, dropout=0.0, *, bias=False, score='scaled_dot', score_hiddens=None, ...)"
    ),
}
_SIZES = "dim, key_dim=None, value_dim=None, heads=1, kv_heads=None, batch=1, dtype='float32'"
PARALLEL = {
    "attend_chunks": (
        "(query, key, value, *, chunk=None, progress=None, score='scaled_dot', mask=None, valid_lens=None, bias=None, "
        "sink=None, head_axis=-3, kernel='auto', return_stats=False)"
    ),
    "balanced_shards": "(mask, length, ranks, chunk=128, *, key_len=None, batch=1)",
    "consecutive_shards": "(mask, length, ranks, chunk=128, *, key_len=None, batch=1)",
    "exchange": "(mask, queries, keys, *, batch=1)",
    "explain": f"(mask, queries, keys=None, *, {_SIZES}, mode='auto', gradient='auto', memory=None)",
    "shard_mask": "(mask, rows, cols, query_len, key_len, *, padded=False)",
    "Shard": "(ranges, length)",
}
RESULTS_OF_PARALLEL = ("Exchange", "ParallelExplanation")
ELSEWHERE = {
    "attnscore.layers.torch": tuple(LAYERS),
    "attnscore.layers.flax": tuple(LAYERS),
    "attnscore.layers.keras": tuple(LAYERS),
    "attnscore.parallel": (*PARALLEL, *RESULTS_OF_PARALLEL),
    "attnscore.plotting": ("show_heatmaps",),
    "attnscore.testing": ("check_score", "check_kernel", "check_framework"),
}


def signature(function: Any) -> str:
    """Names, kinds and defaults, without types."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values() if p.name != "self"]
    return str(inspect.Signature(bare))


def agrees(found: str, expected: str) -> bool:
    """Whether a signature is the expected one, or begins with it where that ends in "..."."""
    return found.startswith(expected.removesuffix(", ...)")) if expected.endswith("...)") else found == expected


# ------------------------------------------------------------------ names and signatures


def test_the_public_names_are_these() -> None:
    promised = {*FUNCTIONS, *SCORES, *MASKS, *CLASSES, *TUPLES, *ERRORS, "IntervalMask", "Mask"}
    assert set(ats.__all__) == promised
    assert len(ats.__all__) == len(promised)
    assert all(hasattr(ats, name) for name in ats.__all__)
    assert sorted(parallel.__all__) == sorted([*PARALLEL, *RESULTS_OF_PARALLEL])


def test_nothing_else_looks_public() -> None:
    """What `dir` shows besides are the modules, which may be imported by their own names."""
    modules = {path.stem for path in Path(ats.__file__).parent.iterdir()}
    shown = {name for name in dir(ats) if not name.startswith("_")}
    assert shown - set(ats.__all__) <= modules


IN_PARALLEL = {f"parallel.{name}": expected for name, expected in PARALLEL.items()}


@pytest.mark.parametrize(("name", "expected"), (FUNCTIONS | SCORES | MASKS | CLASSES).items())
def test_signatures(name: str, expected: str) -> None:
    assert signature(getattr(ats, name)) == expected


@pytest.mark.parametrize(("name", "expected"), (METHODS | IN_PARALLEL).items())
def test_signatures_of_methods_and_of_parallel(name: str, expected: str) -> None:
    assert signature(operator.attrgetter(name)(ats)) == expected


@pytest.mark.parametrize(("name", "expected"), LAYERS.items())
def test_signatures_of_layers(name: str, expected: str) -> None:
    from attnscore.layers import torch as layers

    layer = getattr(layers, name)
    assert agrees(signature(layer), expected), signature(layer)
    call = inspect.signature(layer.forward)
    assert list(call.parameters)[:6] == ["self", "queries", "keys", "values", "valid_lens", "mask"]
    assert call.parameters["valid_lens"].default is None and call.parameters["mask"].default is None


def test_signature_of_heat_maps() -> None:
    from attnscore.plotting import show_heatmaps

    found = inspect.signature(show_heatmaps).parameters
    assert list(found) == ["matrices", "xlabel", "ylabel", "titles", "figsize", "cmap", "label"]
    # None chooses by the sign of the numbers: Reds where none is negative.
    assert found["titles"].default is None and found["cmap"].default is None


def test_signature_of_the_pullback() -> None:
    _, pullback = ats.attend_vjp(*(np.ones((2, 2)) for _ in "qkv"))
    assert signature(pullback) == "(grad_out, grad_log_sum_exp=None, grad_entropy=None, grad_weights=None)"


@pytest.mark.parametrize(("name", "fields"), TUPLES.items())
def test_what_leaves_to_the_user_is_a_named_tuple(name: str, fields: tuple[str, ...]) -> None:
    assert issubclass(getattr(ats, name), tuple)
    assert getattr(ats, name)._fields == fields


def test_what_watch_returns_can_be_named() -> None:
    """Annotations of a user's own functions need the classes of `watch` and of its verdicts."""
    import torch

    from attnscore import diagnostics

    assert set(diagnostics.__all__) == {
        *("Inspection", "Thresholds", "Verdict", "Watch"),
        *("inspect_model", "qk_clip", "reset_heads", "scaling_lab", "watch"),
    }
    with diagnostics.watch(torch.nn.Linear(2, 2)) as seen:
        pass
    assert isinstance(seen, diagnostics.Watch) and inspect.isclass(diagnostics.Verdict)
    with pytest.raises(AttributeError, match="has no attribute 'Recorder'"):
        diagnostics.Recorder  # noqa: B018


def looks_back(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


@pytest.mark.parametrize("name", [*SCORES, *MASKS])
def test_scores_and_masks_are_frozen_dataclasses_compared_by_identity(name: str) -> None:
    cls = getattr(ats, name)
    arguments = {
        "Additive": {"w_v": np.ones(2)},
        "Bilinear": {"W": np.eye(2)},
        "SoftCap": {"score": "dot", "cap": 2.0},
        "Temperature": {"score": "dot", "temperature": 2.0},
        "Combination": {"scores": ("dot",), "weights": (2.0,)},
        "ValidLens": {"lens": 1},
        "KeyRange": {"start": 0, "stop": 1},
        "KeyPadding": {"array": np.ones((1, 2), bool)},
        "PrefixLM": {"prefix_lens": 1},
        "Documents": {"query_ids": [0, 0]},
        "Packed": {"cu_query": [0, 2]},
        "Neighbours": {"indptr": [0, 1, 2], "indices": [1, 0]},
        "Dense": {"array": np.ones((2, 2), bool)},
        "MaskFunction": {"function": looks_back},
    }.get(name, {})
    one, other = cls(**arguments), cls(**arguments)
    assert dataclasses.is_dataclass(cls)
    assert one != other and len({one, other, one}) == 2
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field.name, None)
    text = repr(one)
    assert text.startswith(f"{name}(") and "\n" not in text and "object at" not in text
    assert repr(dataclasses.replace(one)) == text
    assert repr(copy.deepcopy(one)) == text
    assert repr(pickle.loads(pickle.dumps(one))) == text


def test_registered_names() -> None:
    from attnscore import scores

    class Ones:
        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return ops.matmul(query, ops.matrix_transpose(key)) * 0

    ats.register_score("ones", Ones)
    ats.register_score("ones", Ones)
    assert {"dot", "scaled_dot", "gaussian", "cosine", "sum", "ones"} <= set(scores.registered())
    assert ats.attention_weights(np.ones((1, 2)), np.ones((4, 2)), score="ones").tolist() == [[0.25] * 4]
    with pytest.raises(ats.ArgumentError, match="ones"):
        ats.attend(np.ones((1, 2)), np.ones((4, 2)), np.ones((4, 2)), score="twos")


def test_version_and_types() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", ats.__version__)
    assert (Path(ats.__file__).parent / "py.typed").exists()


def test_results_are_arrays_of_the_kind_that_came() -> None:
    import torch

    x = np.ones((2, 3), np.float32)
    for kind, array in ((np.ndarray, x), (torch.Tensor, torch.ones(2, 3)), (jax.Array, jnp.ones((2, 3)))):
        out, weights, stats = ats.attend(array, array, array, return_weights=True, return_stats=True)
        assert isinstance(stats, ats.AttentionStats)
        for found in (out, weights, *stats[:-1]):
            assert isinstance(found, kind) and found.dtype == array.dtype
        assert str(stats.argmax_key.dtype).endswith("int32")
    gradients = ats.attend_vjp(x, x, x)[1](x)
    assert isinstance(gradients, ats.Gradients) and gradients.score == {}
    assert isinstance(ats.cost("dot", query_len=1, key_len=1, dim=1), ats.Cost)


# ------------------------------------------------------------------ docstrings

# In numpydoc's order.
SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "See Also", "Notes", "References", "Examples")
DOCUMENTED = {f"attnscore.{name}": getattr(ats, name) for name in ats.__all__} | {
    f"{module}.{name}": getattr(importlib.import_module(module), name)
    for module, names in ELSEWHERE.items()
    for name in names
}
CALLABLES = {name: x for name, x in DOCUMENTED.items() if inspect.isfunction(x)}
WITH_PARAMETERS = CALLABLES | {
    name: x
    for name, x in DOCUMENTED.items()
    if inspect.isclass(x) and name.split(".")[-1] in {*SCORES, *CLASSES, *LAYERS, *PARALLEL}
}


def sections(doc: str) -> dict[str, list[str]]:
    """A docstring's sections by title; the text before the first one is under "". Checks the underlines."""
    lines = inspect.cleandoc(doc).splitlines()
    found: dict[str, list[str]] = {"": []}
    current = ""
    for i, line in enumerate(lines):
        if set(line) == {"-"}:
            continue
        if i + 1 < len(lines) and set(lines[i + 1]) == {"-"} and lines[i + 1]:
            assert len(lines[i + 1]) == len(line), f"the line under {line!r} is not as long"
            assert line not in found, f"two sections {line!r}"
            current = line
            found[current] = []
        else:
            found[current].append(line)
    return found


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_have_the_shape(name: str) -> None:
    doc = inspect.getdoc(DOCUMENTED[name])
    assert doc, "no docstring"
    found = sections(doc)
    summary = found[""][0]
    assert summary.rstrip().endswith((".", ":")), f"the summary ends in no full stop: {summary!r}"
    assert len(found[""]) == 1 or not found[""][1], "the summary is one line, then an empty one"
    titles = [title for title in found if title]
    assert titles == [title for title in SECTIONS if title in titles], titles
    assert all(any(line.strip() for line in found[title]) for title in titles), "an empty section"


def _doc(name: str) -> str:
    return inspect.getdoc(DOCUMENTED[name]) or ""


def documented_parameters(name: str) -> set[str]:
    lines = sections(_doc(name)).get("Parameters", [])
    entries = [line for line in lines if line and not line.startswith(" ")]
    return {part.strip().lstrip("*") for line in entries for part in line.partition(" :")[0].split(",")}


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_parameters_are_documented_and_no_others(name: str) -> None:
    function = WITH_PARAMETERS[name]
    # Flax and Keras hide the signatures of their classes.
    hidden = name.startswith(("attnscore.layers.flax", "attnscore.layers.keras"))
    function = function.__init__ if hidden else function
    parameters = {p for p in inspect.signature(function).parameters if p not in ("self", "args")}
    # Where a sibling has the same arguments, its name in the text sends the reader there.
    elsewhere = re.search(r"[Pp]arameters.* (are|is) (those|that) of `\w+`|as in `\w+`|As in `\w+`", _doc(name))
    found = documented_parameters(name)
    if name.startswith("attnscore.layers"):
        # What every nn.Module takes and means the same by.
        parameters -= {"device", "dtype"}
        found -= {"device", "dtype"}
    found -= {"..."}
    assert found <= parameters, f"documented, but no parameter: {found - parameters}"
    assert found == parameters or elsewhere, f"not documented: {parameters - found}"


@pytest.mark.parametrize("name", [name for name in CALLABLES if not name.startswith("attnscore.testing")])
def test_functions_say_what_they_return_and_raise_and_give_an_example(name: str) -> None:
    found = sections(_doc(name))
    delegated = re.search(r"errors are those of `\w+`", _doc(name))
    returns = inspect.signature(CALLABLES[name]).return_annotation not in (None, "None")
    wanted = {"Examples"} | ({"Returns"} if returns else set())
    wanted |= {"Raises"} if inspect.signature(CALLABLES[name]).parameters and not delegated else set()
    missing = wanted - set(found)
    assert not missing
    assert "".join(found["Examples"]).count(">>>") > 0, "no example"


@pytest.mark.parametrize("name", [*SCORES, *MASKS, "AttentionStats", "register_score"])
def test_scores_masks_and_statistics_give_an_example(name: str) -> None:
    example = "".join(sections(_doc(f"attnscore.{name}")).get("Examples", []))
    assert example.count(">>>") > 0, "no example"


@pytest.mark.parametrize("name", SCORES)
def test_scores_begin_with_their_formula(name: str) -> None:
    summary = _doc(f"attnscore.{name}").splitlines()[0]
    assert re.search(r"a\(q, k\) = |score / T|cap \* tanh", summary), summary


@pytest.mark.parametrize("name", [name for name, x in DOCUMENTED.items() if inspect.isclass(x)])
def test_public_methods_are_documented(name: str) -> None:
    """In the class or where they are promised: in a base that is ours."""
    cls = DOCUMENTED[name]
    bare = [
        method
        for method, x in vars(cls).items()
        if not method.startswith("_") and (inspect.isfunction(x) or isinstance(x, (property, classmethod)))
        if not inspect.getdoc(getattr(cls, method))
    ]
    assert not bare


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_errors_named_in_a_docstring_are_ours(name: str) -> None:
    for line in sections(_doc(name)).get("Raises", []):
        if line and not line.startswith(" "):
            for error in line.split(","):
                assert error.strip() in {*ERRORS, "AssertionError", "TypeError", "FileNotFoundError"}, error


def test_every_module_says_what_it_is_for() -> None:
    source = Path(ats.__file__).parent
    bare = [
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if not path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""'))
    ]
    assert not bare


# ------------------------------------------------------------------ older names


def test_older_names_of_a_temperature_warn() -> None:
    expected = r"Temperature\.T is now Temperature\.temperature; the old spelling works until 0\.2"
    with pytest.warns(DeprecationWarning, match=r"\(T=\) is now .*\(temperature=\)") as caught:
        score = ats.Temperature("dot", T=3.0)  # type: ignore[call-arg]
    assert caught[0].filename == __file__ and score.temperature == 3.0
    with pytest.warns(DeprecationWarning, match=expected) as caught:
        assert score.T == 3.0
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="unexpected keyword argument 'degrees'"):
        ats.Temperature("dot", degrees=3.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "old", "new", "error"),
    [
        (lambda: show_long_attention(np.ones((2, 3)), np.ones((2, 3)), links=0), "links", "k", "k: expected a whole"),
        (lambda: inspect_model("no folder", "text", most_tokens=3), "most_tokens", "max_tokens", "no folder"),
    ],
)
def test_older_names_of_arguments_warn(call: Any, old: str, new: str, error: str) -> None:
    """They reach the function: its error speaks of the new name."""
    expected = rf"\({old}=\) is now .*\({new}=\).*until 0\.2"
    with pytest.warns(DeprecationWarning, match=expected) as caught, pytest.raises(ats.ArgumentError, match=error):
        call()
    assert caught[0].filename == __file__
