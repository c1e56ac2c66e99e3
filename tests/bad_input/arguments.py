"""Numbers, names, flags and indices outside what an argument allows."""

from __future__ import annotations

import numpy as np

import attnscore as ats
from attnscore import ArgumentError, DtypeError, FileError, FrameworkError, KernelUnavailable
from attnscore.problem.statistics import STATISTICS
from bad_input.table import Errors, Rows, cases

_NAN, _INF = float("nan"), float("inf")
_STATISTICS = "|".join(STATISTICS)

_CALL: Rows = {
    **{
        f"dropout={p!r}": (f"dropout|a number in [0, 1)|got {p!r}", lambda x, p=p: x.attend(dropout=p, seed=1))
        for p in (1.0, 1, -0.1, 2, _NAN, _INF, None, "0.1", True, [0.1], 1j)
    },
    **{
        f"seed={seed!r}": (
            f"seed|a whole number or None|got {seed!r}",
            lambda x, seed=seed: x.attend(dropout=0.5, seed=seed),
        )
        for seed in (1.5, _NAN, "one", True, [1], (1, 2))
    },
    "a wrong seed without dropout": ("seed|a whole number or None|1.5", lambda x: x.attend(seed=1.5)),
    **{
        f"head_axis={axis!r}": (
            f"head_axis|-3|-2|(batch, head, length, dim)|got {axis!r}|query (2, 4, 3, 4)",
            lambda x, axis=axis: x.heads(4, 2, head_axis=axis),
        )
        for axis in (7, 1, 0, -1, None, "heads", [1, 2])
    },
    "head_axis without heads": ("head_axis|-3|-2|got 7|query (2, 3, 4)", lambda x: x.attend(head_axis=7)),
    "head_axis as an array": ("head_axis|-3|-2", lambda x: x.heads(4, 2, head_axis=np.array([-3, -2]))),
    "head_axis for weights": ("head_axis|-3|-2|got 7", lambda x: x.weights(head_axis=7)),
    **{
        f"kernel={kernel!r}": (
            f"kernel|one of|auto|streaming|dense|got {kernel!r}",
            lambda x, kernel=kernel: x.attend(kernel=kernel),
        )
        for kernel in ("cuda", "", None, 5, ["dense"])
    },
    **{
        f"{option}, {name!r} for another name": (
            f"{option}|got|{name}|Hint: did you mean {meant!r}?",
            lambda x, option=option, name=name: x.attend(**{option: name}),
        )
        for option, name, meant in (
            ("kernel", "Nativ", "native"),
            ("normalizer", "soft-max", "softmax"),
            ("return_stats", "entropi", "entropy"),
        )
    },
    "kernel of explain": (
        "kernel|one of|auto|streaming|dense|got 'cuda'",
        lambda x: ats.explain(**x.three(), kernel="cuda"),
    ),
    "an unknown statistic": (
        f"return_stats|{_STATISTICS}|got|kurtosis",
        lambda x: x.attend(return_stats=("entropy", "kurtosis")),
    ),
    "an unknown statistic as a word": (
        f"return_stats|{_STATISTICS}|kurtosis",
        lambda x: x.attend(return_stats="kurtosis"),
    ),
    "a statistic by number": ("return_stats|entropy|3", lambda x: x.attend(return_stats=(3,))),
    "return_stats a number": ("return_stats|entropy|3", lambda x: x.attend(return_stats=3)),
    "return_stats a float": ("return_stats|entropy|0.5", lambda x: x.attend(return_stats=0.5)),
}

_SINKS: Rows = {
    f"a sink with {normalizer!r}": (
        f"sink|nothing with normalizer={normalizer!r}: a sink is a logit of the softmax|got 1.0",
        lambda x, normalizer=normalizer: x.attend(sink=1.0, normalizer=normalizer),
    )
    for normalizer in ("sigmoid", "sparsemax", ats.Entmax(1.25))
}

_LENGTH_OF = {"query_index": 3, "key_index": 5}
_INDICES: Rows = {
    **{
        f"{name}={index!r}": (
            f"{name}|positions from {-length} to {length - 1}, as there are {length}|{index}",
            lambda x, name=name, index=index: x.weights(**{name: index}),
        )
        for name, length in _LENGTH_OF.items()
        for index in (length, -length - 1, [0, length])
    },
    **{
        f"{name}={index!r}": (
            f"{name}|a slice, a whole number or a list of them|{index!r}",
            lambda x, name=name, index=index: x.weights(**{name: index}),
        )
        for name in _LENGTH_OF
        for index in (
            *(0.0, "first", [[0, 1]], [0, None], [[0], [1, 2]], [True, False]),
            *(slice(0.5, None), slice("a", None)),
        )
    },
    **{
        f"{name} for scores": (
            f"{name}|positions from {-length} to {length - 1}, as there are {length}|99",
            lambda x, name=name: ats.attention_scores(x.floats(2, 3, 4), x.floats(2, 5, 4), **{name: 99}),
        )
        for name, length in _LENGTH_OF.items()
    },
}

_SOFTMAX: Errors = {
    FrameworkError: {
        "scores None": ("scores|an array|NoneType", lambda x: ats.masked_softmax(None)),
        "scores a list": ("scores|an array|list|Hint", lambda x: ats.masked_softmax([[1.0]])),
    },
    DtypeError: {
        "whole-number scores": ("scores|a floating dtype|int64", lambda x: ats.masked_softmax(x.ints(2, 3))),
        "complex scores": ("scores|a floating dtype|complex64", lambda x: ats.masked_softmax(x.complexes(3))),
    },
    ArgumentError: {
        **{
            f"temperature={t!r}": (f"temperature|number above 0|got {t!r}", lambda x, t=t: x.softmax(temperature=t))
            for t in (0, 0.0, -1.0, _NAN, "hot", None, True, 1j, [1.0])
        },
        **{
            f"axis={axis!r}": (
                f"axis|an axis of the 3 of scores|got {axis!r}|(2, 3, 5)",
                lambda x, axis=axis: x.softmax(axis=axis),
            )
            for axis in (3, -4, None, "key", 1.5, (0, 1))
        },
        "a softmax of a number": ("axis|an axis of the 0 of scores|got -1", lambda x: ats.masked_softmax(x.array(1.0))),
    },
}

_KERNELS: Rows = {
    "a kernel that does not take the call": (
        "kernel|a call that 'gather' can run|Neighbours|Hint: kernel=\"auto\" takes one that can run it",
        lambda x: x.attend(kernel="gather"),
    ),
}

_FILES: Rows = {
    "a cache that is no file": (
        "no-such.safetensors|no such file",
        lambda x: ats.KeyValueCache.load("no-such.safetensors", like=x.floats(1)),
    ),
}

_NO_GRADIENT: Rows = {
    "a kernel without gradient": (
        "dense|gradient|streaming",
        lambda x: ats.attend_vjp(**x.three(), kernel="dense")[1](x.floats(2, 3, 6)),
    ),
}

_OWN_WORDS: Rows = {
    "dropout per head": ("dropout|a number in [0, 1)", lambda x: x.attend(dropout=x.array([0.1, 0.2]))),
    "a temperature as an array": (
        "temperature: expected a finite number above 0, got an array (|Hint: divide the scores by it",
        lambda x: x.softmax(temperature=x.array(2.0)),
    ),
    **{
        f"{name} of floats": (
            f"{name}|a slice, a whole number or a list of them",
            lambda x, name=name: x.weights(**{name: x.array([0.0, 1.0])}),
        )
        for name in _LENGTH_OF
    },
}

CASES = (
    *cases({ArgumentError: _CALL | _SINKS | _INDICES, KernelUnavailable: _KERNELS, FileError: _FILES}),
    *cases(_SOFTMAX),
    *cases({KernelUnavailable: _NO_GRADIENT}, only="numpy"),
    *cases({ArgumentError: _OWN_WORDS}, same=False),
)
