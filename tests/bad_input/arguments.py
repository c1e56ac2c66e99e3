"""Numbers, names, flags and indices outside what an argument allows."""

from __future__ import annotations

import numpy as np

import attnscore as ats
from attnscore import ArgumentError, DtypeError, FileError, FrameworkError, KernelUnavailable
from attnscore.problem.statistics import STATISTICS
from bad_input.table import case

_NAN, _INF = float("nan"), float("inf")
_STATISTICS = "|".join(STATISTICS)

_CALL = (
    *(
        case(
            f"dropout={p!r}",
            ArgumentError,
            f"dropout|a number in [0, 1)|got {p!r}",
            lambda x, p=p: x.attend(dropout=p, seed=1),
        )
        for p in (1.0, 1, -0.1, 2, _NAN, _INF, None, "0.1", True, [0.1], 1j)
    ),
    case(
        "dropout per head",
        ArgumentError,
        "dropout|a number in [0, 1)",
        lambda x: x.attend(dropout=x.array([0.1, 0.2])),
        same=False,
    ),
    *(
        case(
            f"seed={seed!r}",
            ArgumentError,
            f"seed|a whole number or None|got {seed!r}",
            lambda x, seed=seed: x.attend(dropout=0.5, seed=seed),
        )
        for seed in (1.5, _NAN, "one", True, [1], (1, 2))
    ),
    case(
        "a wrong seed without dropout", ArgumentError, "seed|a whole number or None|1.5", lambda x: x.attend(seed=1.5)
    ),
    *(
        case(
            f"head_axis={axis!r}",
            ArgumentError,
            f"head_axis|-3|-2|(batch, head, length, dim)|got {axis!r}|query (2, 4, 3, 4)",
            lambda x, axis=axis: x.heads(4, 2, head_axis=axis),
        )
        for axis in (7, 1, 0, -1, None, "heads", [1, 2])
    ),
    case(
        "head_axis without heads",
        ArgumentError,
        "head_axis|-3|-2|got 7|query (2, 3, 4)",
        lambda x: x.attend(head_axis=7),
    ),
    case(
        "head_axis as an array",
        ArgumentError,
        "head_axis|-3|-2",
        lambda x: x.heads(4, 2, head_axis=np.array([-3, -2])),
    ),
    case("head_axis for weights", ArgumentError, "head_axis|-3|-2|got 7", lambda x: x.weights(head_axis=7)),
    *(
        case(
            f"kernel={kernel!r}",
            ArgumentError,
            f"kernel|one of|auto|streaming|dense|got {kernel!r}",
            lambda x, kernel=kernel: x.attend(kernel=kernel),
        )
        for kernel in ("cuda", "", None, 5, ["dense"])
    ),
    *(
        case(
            f"{option}, {name!r} for another name",
            ArgumentError,
            f"{option}|got|{name}|Hint: did you mean {meant!r}?",
            lambda x, option=option, name=name: x.attend(**{option: name}),
        )
        for option, name, meant in (
            ("kernel", "Nativ", "native"),
            ("normalizer", "soft-max", "softmax"),
            ("return_stats", "entropi", "entropy"),
        )
    ),
    case(
        "kernel of explain",
        ArgumentError,
        "kernel|one of|auto|streaming|dense|got 'cuda'",
        lambda x: ats.explain(**x.three(), kernel="cuda"),
    ),
    case(
        "an unknown statistic",
        ArgumentError,
        f"return_stats|{_STATISTICS}|got|kurtosis",
        lambda x: x.attend(return_stats=("entropy", "kurtosis")),
    ),
    case(
        "an unknown statistic as a word",
        ArgumentError,
        f"return_stats|{_STATISTICS}|kurtosis",
        lambda x: x.attend(return_stats="kurtosis"),
    ),
    case("a statistic by number", ArgumentError, "return_stats|entropy|3", lambda x: x.attend(return_stats=(3,))),
    case("return_stats a number", ArgumentError, "return_stats|entropy|3", lambda x: x.attend(return_stats=3)),
    case("return_stats a float", ArgumentError, "return_stats|entropy|0.5", lambda x: x.attend(return_stats=0.5)),
)

_SINKS = tuple(
    case(
        f"a sink with {normalizer!r}",
        ArgumentError,
        f"sink|nothing with normalizer={normalizer!r}: a sink is a logit of the softmax|got 1.0",
        lambda x, normalizer=normalizer: x.attend(sink=1.0, normalizer=normalizer),
    )
    for normalizer in ("sigmoid", "sparsemax", ats.Entmax(1.25))
)

_INDICES = tuple(
    row
    for name, length in (("query_index", 3), ("key_index", 5))
    for row in (
        *(
            case(
                f"{name}={index!r}",
                ArgumentError,
                f"{name}|positions from {-length} to {length - 1}, as there are {length}|{index}",
                lambda x, name=name, index=index: x.weights(**{name: index}),
            )
            for index in (length, -length - 1, [0, length])
        ),
        *(
            case(
                f"{name}={index!r}",
                ArgumentError,
                f"{name}|a slice, a whole number or a list of them|{shown}",
                lambda x, name=name, index=index: x.weights(**{name: index}),
            )
            for index, shown in (
                (0.0, "0.0"),
                ("first", "'first'"),
                ([[0, 1]], "[[0, 1]]"),
                ([0, None], "[0, None]"),
                ([[0], [1, 2]], "[[0], [1, 2]]"),
                ([True, False], "[True, False]"),
                (slice(0.5, None), "slice(0.5, None, None)"),
                (slice("a", None), "slice('a', None, None)"),
            )
        ),
        case(
            f"{name} of floats",
            ArgumentError,
            f"{name}|a slice, a whole number or a list of them",
            lambda x, name=name: x.weights(**{name: x.array([0.0, 1.0])}),
            same=False,
        ),
        case(
            f"{name} for scores",
            ArgumentError,
            f"{name}|positions from {-length} to {length - 1}, as there are {length}|99",
            lambda x, name=name: ats.attention_scores(x.floats(2, 3, 4), x.floats(2, 5, 4), **{name: 99}),
        ),
    )
)

_SOFTMAX = (
    case("scores None", FrameworkError, "scores|an array|NoneType", lambda x: ats.masked_softmax(None)),
    case("scores a list", FrameworkError, "scores|an array|list|Hint", lambda x: ats.masked_softmax([[1.0]])),
    case(
        "whole-number scores", DtypeError, "scores|a floating dtype|int64", lambda x: ats.masked_softmax(x.ints(2, 3))
    ),
    case(
        "complex scores", DtypeError, "scores|a floating dtype|complex64", lambda x: ats.masked_softmax(x.complexes(3))
    ),
    *(
        case(
            f"temperature={t!r}",
            ArgumentError,
            f"temperature|number above 0|got {t!r}",
            lambda x, t=t: x.softmax(temperature=t),
        )
        for t in (0, 0.0, -1.0, _NAN, "hot", None, True, 1j, [1.0])
    ),
    case(
        "a temperature as an array",
        ArgumentError,
        "temperature: expected a finite number above 0, got an array (|Hint: divide the scores by it",
        lambda x: x.softmax(temperature=x.array(2.0)),
        same=False,
    ),
    *(
        case(
            f"axis={axis!r}",
            ArgumentError,
            f"axis|an axis of the 3 of scores|got {axis!r}|(2, 3, 5)",
            lambda x, axis=axis: x.softmax(axis=axis),
        )
        for axis in (3, -4, None, "key", 1.5, (0, 1))
    ),
    case(
        "a softmax of a number",
        ArgumentError,
        "axis|an axis of the 0 of scores|got -1",
        lambda x: ats.masked_softmax(x.array(1.0)),
    ),
)

_KERNELS = (
    case(
        "a kernel that does not take the call",
        KernelUnavailable,
        "kernel|a call that 'gather' can run|Neighbours|Hint: kernel=\"auto\" takes one that can run it",
        lambda x: x.attend(kernel="gather"),
    ),
    case(
        "a kernel without gradient",
        KernelUnavailable,
        "dense|gradient|streaming",
        lambda x: ats.attend_vjp(**x.three(), kernel="dense")[1](x.floats(2, 3, 6)),
        only="numpy",
    ),
)

_FILES = (
    case(
        "a cache that is no file",
        FileError,
        "no-such.safetensors|no such file",
        lambda x: ats.KeyValueCache.load("no-such.safetensors", like=x.floats(1)),
    ),
)

CASES = (*_CALL, *_SINKS, *_INDICES, *_SOFTMAX, *_KERNELS, *_FILES)
