"""What lies around attend(): VJPs, merge, Jacobians, costs, the registry, statistics, maps, threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import attnscore as ats
from attnscore import ArgumentError, DtypeError, FrameworkError, MaskError, ShapeError
from bad_input.table import Errors, Maker, Rows, cases


def _pull(x: Maker, *grads: Any, stats: Any = False, **named: Any) -> Any:
    """The VJP of attend_vjp() of query (2, 3, 4), key (2, 5, 4), value (2, 5, 6), called."""
    return ats.attend_vjp(**x.three(), return_stats=stats)[1](*grads, **named)


@dataclass(frozen=True, eq=False)
class _Own:
    """A user's score without tile_gradient, of an operation whose gradient NumPy does not know."""

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return ops.matmul(ops.cumsum(query, axis=-1), ops.matrix_transpose(key))


class _Needy:
    """A score whose signature does not say that it needs an argument."""

    def __init__(self, *given: Any) -> None:
        self.score = ats.Bilinear(*given)

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return self.score.tile(ops, query, key)


def _needy(*given: Any) -> Any:
    return ats.Bilinear(*given)


def _capped(cap: float) -> Any:
    return ats.SoftCap("dot", cap)


def _five() -> Any:
    return 5


_MERGE: Errors = {
    ArgumentError: {
        "merge of nothing": ("outs|log_sum_exps|at least one", lambda x: ats.merge([], [])),
        "more outs than log-sum-exps": (
            "outs, log_sum_exps|as many of one as of the other|(2, 1)",
            lambda x: ats.merge([x.floats(3, 2)] * 2, [x.floats(3)]),
        ),
    },
    FrameworkError: {
        "merge(None)": ("outs|list|NoneType", lambda x: ats.merge(None, None)),
        "merge of numbers": ("outs|list|int", lambda x: ats.merge(3, 4)),
        "merge of lists": ("outs[0]|an array|list", lambda x: ats.merge([[1.0, 2.0]], [x.floats(2)])),
    },
    ShapeError: {
        "outs of two shapes": (
            "outs[1]|(..., query, value_dim)|(3, 4)|outs[0] (3, 2)",
            lambda x: ats.merge([x.floats(3, 2), x.floats(3, 4)], [x.floats(3), x.floats(3)]),
        ),
        "log-sum-exp with an axis too many": (
            "log_sum_exps[0]|without its last axis|(3, 2) and (3, 1)",
            lambda x: ats.merge([x.floats(3, 2)], [x.floats(3, 1)]),
        ),
    },
    DtypeError: {
        "merge of whole numbers": (
            "outs[0]|a floating dtype|int64",
            lambda x: ats.merge([x.ints(3, 2)], [x.floats(3)]),
        ),
        "merge of whole-number log-sum-exps": (
            "log_sum_exps[0]|a floating dtype|int64",
            lambda x: ats.merge([x.floats(3, 2)], [x.ints(3)]),
        ),
    },
}

_JACOBIAN: Errors = {
    FrameworkError: {
        "Jacobian of None": ("weights|an array|NoneType", lambda x: ats.softmax_jacobian(None)),
        "Jacobian of a list": ("weights|an array|list", lambda x: ats.softmax_jacobian([0.5, 0.5])),
    },
    ShapeError: {
        "Jacobian of a number": ("weights|1 axis or more|weights ()", lambda x: ats.softmax_jacobian(x.array(1.0))),
        "VJP of another shape": (
            "grad|the shape of weights|got (2, 4)|weights (2, 3)",
            lambda x: ats.softmax_pullback(x.floats(2, 3), x.floats(2, 4)),
        ),
        "VJP of numbers": (
            "weights|1 axis or more|weights ()",
            lambda x: ats.softmax_pullback(x.array(1.0), x.array(1.0)),
        ),
    },
    DtypeError: {
        "Jacobian of whole numbers": ("weights|a floating dtype|int64", lambda x: ats.softmax_jacobian(x.ints(3))),
        "VJP of another dtype": (
            "grad|the dtype of weights (float32)|got float64",
            lambda x: ats.softmax_pullback(x.floats(3), x.floats(3, dtype="float64")),
        ),
        "VJP of whole numbers": (
            "weights|a floating dtype|int64",
            lambda x: ats.softmax_pullback(x.ints(3), x.ints(3)),
        ),
    },
}


def _cost(score: Any = "dot", **given: Any) -> Any:
    return ats.cost(score, **{"query_len": 3, "key_len": 5, "dim": 4} | given)


_COST: Errors = {
    ArgumentError: {
        "cost of an unknown score": ("score|one of|dot|additive|'dott'", lambda x: _cost("dott")),
        "cost of an additive score without its size": (
            'num_hiddens|a whole number, 0 or more, for score="additive"|got None|Hint: the h of W_q (h, dim)',
            lambda x: _cost("additive"),
        ),
        "hidden units of a product": (
            'num_hiddens|None unless score="additive"|got 8|Hint: a score object has its own sizes',
            lambda x: _cost("bilinear", num_hiddens=8),
        ),
        "hidden units of a score object": (
            'num_hiddens|None unless score="additive"|got 8|Hint: a score object has its own sizes',
            lambda x: _cost(ats.Sum(), num_hiddens=8),
        ),
        "more parameters than can be counted": (
            "dim, key_dim, num_hiddens|sizes of which NumPy makes an array",
            lambda x: _cost("additive", num_hiddens=2**62),
        ),
        "cost of a class": ("score|Hint: Dot(...) makes one", lambda x: _cost(ats.Dot)),
        **{
            f"{name}={number!r}": (
                f"{name}|a whole number, 0 or more|got {number!r}",
                lambda x, name=name, number=number: _cost(**{name: number}),
            )
            for name in ("query_len", "key_len", "dim", "key_dim", "value_dim", "heads", "batch")
            for number in (-1, 1.5, "many", True)
        },
        **{
            f"num_hiddens={number!r}": (
                f"num_hiddens|a whole number, 0 or more|got {number!r}",
                lambda x, number=number: _cost("additive", num_hiddens=number),
            )
            for number in (-1, 1.5, "many", True)
        },
        "cost without a length": ("query_len|a whole number, 0 or more|got None", lambda x: _cost(query_len=None)),
    },
    ShapeError: {
        "cost of unequal vectors": ("key|vectors of the dimension of query (4)|got 7", lambda x: _cost(key_dim=7)),
    },
}

_REGISTRY: Rows = {
    "a name that is taken": ("name|a new name|'dot'", lambda x: ats.register_score("dot", ats.Sum)),
    "a name that is a number": ("name|a name|got 3", lambda x: ats.register_score(3, ats.Sum)),
    "no name": ("name|a name|got ''", lambda x: ats.register_score("", ats.Sum)),
    "a class that scores nothing": (
        "cls|a class with a method tile(ops, query, key)|int",
        lambda x: ats.register_score("whole", int),
    ),
    "a score instead of its class": (
        "cls|a class with a method tile(ops, query, key)|Dot()",
        lambda x: ats.register_score("point", ats.Dot()),
    ),
    "None instead of a class": ("cls|a class with a method tile|None", lambda x: ats.register_score("none", None)),
    "register a class that needs arguments": (
        "cls|makes a score without arguments|Bilinear: missing a required argument: 'W'"
        "|Hint: register_score('luong', lambda: Bilinear(...))",
        lambda x: ats.register_score("luong", ats.Bilinear),
    ),
    "register a function that needs arguments": (
        "cls|makes a score without arguments|_capped: missing a required argument: 'cap'",
        lambda x: ats.register_score("capped", _capped),
    ),
    **{
        f"a registered {kind} that needs arguments after all, {how}": (
            f"score|a registered name whose class or function makes a score without arguments|got 'needy {kind}'|'W'",
            lambda x, made=made, call=call, name=f"needy {kind}": (ats.register_score(name, made), call(x, name)),
        )
        for kind, made in (("function", _needy), ("class", _Needy))
        for how, call in (
            ("attend", lambda x, name: x.attend(score=name)),
            ("weights", lambda x, name: x.weights(score=name)),
            ("cost", lambda x, name: ats.cost(name, query_len=3, key_len=5, dim=4)),
            ("SoftCap", lambda x, name: x.attend(score=ats.SoftCap(name, 2.0))),
        )
    },
    "a registered function that makes no score": (
        "score|a registered name or a score object with a method tile|got 5",
        lambda x: (ats.register_score("five", _five), x.attend(score="five")),
    ),
}


def _stats(x: Maker, *names: str) -> ats.AttentionStats:
    return x.attend(return_stats=names)[1]


_STATS: Rows = {
    "effective keys without the entropy": ("return_stats|entropy", lambda x: _stats(x, "max_weight").effective_keys()),
    "Jacobian trace without its sums": (
        "return_stats|sum_weights|sum_sq_weights",
        lambda x: _stats(x, "sum_weights").jacobian_trace(),
    ),
    "saturation without the largest weight": ("return_stats|max_weight", lambda x: _stats(x, "entropy").saturated()),
    "summary without sums": ("return_stats|sum_weights", lambda x: _stats(x, "entropy").summary()),
    **{
        f"threshold={threshold!r}": (
            f"threshold|a number in (0, 1]|got {threshold!r}",
            lambda x, threshold=threshold: _stats(x, "max_weight").saturated(threshold),
        )
        for threshold in (0, 1.5, -0.1, float("nan"), "most", None)
    },
}

_HEAT_MAPS: Rows = {
    "a heat map of one axis": ("matrices|(3,)", lambda x: _heatmaps(x.floats(3))),
    "a heat map of five axes": ("matrices|(1, 1, 1, 2, 3)", lambda x: _heatmaps(x.floats(1, 1, 1, 2, 3))),
    "more titles than maps": ("titles|2", lambda x: _heatmaps(x.floats(1, 2, 3, 3), titles=["a", "b", "c"])),
}


def _heatmaps(matrices: Any, **given: Any) -> Any:
    from attnscore.plotting import show_heatmaps

    return show_heatmaps(matrices, "Keys", "Queries", **given)


def _maps(x: Maker, function: Any, *rest: Any, **given: Any) -> Any:
    """A map of the weights of query (2, 3, 4) and key (2, 5, 4)."""
    pair = {"query": x.floats(2, 3, 4), "key": x.floats(2, 5, 4)} | given
    return function(pair.pop("query"), pair.pop("key"), *rest, **pair)


_MAPS: Rows = {
    **{
        f"k={k!r}": (
            f"k: |a whole number from 1 to the number of keys (5)|got {k!r}",
            lambda x, k=k: _maps(x, ats.top_weights, k),
        )
        for k in (0, -1, 6, 1.5, "two", None, True)
    },
    **{
        f"bins={bins!r}": (
            f"bins|two positive whole numbers (rows, columns)|got {bins!r}",
            lambda x, bins=bins: _maps(x, ats.pooled_weights, bins),
        )
        for bins in (3, (1,), (2, 0), (1.5, 2), (1, 2, 3), "ab", None)
    },
}
_SUMMARIES = {"top_weights": (2,), "pooled_weights": (), "key_mass": ()}


def _summary(name: str, rest: tuple[int, ...]) -> Errors:
    """Mistakes in a call of `top_weights` and its like."""
    f = getattr(ats, name)
    return {
        FrameworkError: {f"{name}(None)": ("query|an array|NoneType", lambda x: f(None, None, *rest))},
        ShapeError: {
            f"{name} of unequal vectors": (
                "key|(2, 3, 4)|(2, 5, 7)",
                lambda x: _maps(x, f, *rest, key=x.floats(2, 5, 7)),
            ),
        },
        MaskError: {
            f"{name} past the keys": (
                "valid_lens|numbers from 0 to 5|got 9",
                lambda x: _maps(x, f, *rest, valid_lens=[1, 9]),
            ),
        },
    }


_THREADS: Rows = {
    f"n={n!r} threads": (f"n: |a whole number from 1 to 1024|got {n!r}", lambda x, n=n: ats.set_num_threads(n))
    for n in (0, 1025, -1, 1.5, "all", None, True)
}

_TORCH: Rows = {
    "a VJP where there is autodiff": (
        "query|a NumPy array|torch|Hint: attend() is differentiable",
        lambda x: ats.attend_vjp(**x.three()),
    ),
}

_NUMPY: Errors = {
    FrameworkError: {
        "attend_vjp(None)": ("query|an array", lambda x: ats.attend_vjp(None, None, None)),
        "grad_out as text": ("grad_out|array|str", lambda x: _pull(x, "text")),
        "custom score without a gradient": (
            "score|known in NumPy|cumsum|Hint|tile_gradient|PyTorch",
            lambda x: ats.attend_vjp(**x.three(score=_Own()))[1](x.floats(2, 3, 6)),
        ),
    },
    ShapeError: {
        "grad_out of another shape": ("grad_out|(2, 3, 6)|got (2, 3, 4)", lambda x: _pull(x, x.floats(2, 3, 4))),
        "grad_out a number": ("grad_out|(2, 3, 6)|got ()", lambda x: _pull(x, 1.0)),
        "grad_log_sum_exp of another shape": (
            "grad_log_sum_exp|(2, 3)|got (2, 3, 1)",
            lambda x: _pull(x, None, x.floats(2, 3, 1)),
        ),
        "grad_entropy of another shape": (
            "grad_entropy|(2, 3)|got (3,)",
            lambda x: _pull(x, None, grad_entropy=x.floats(3), stats=True),
        ),
    },
    DtypeError: {
        "grad_out complex": ("grad_out|floating|complex", lambda x: _pull(x, x.complexes(2, 3, 6))),
    },
    ArgumentError: {
        "grad_entropy without an entropy": (
            "grad_entropy|return_stats|entropy",
            lambda x: _pull(x, None, grad_entropy=x.floats(2, 3)),
        ),
    },
}

_OWN_WORDS: Rows = {
    "merge across frameworks": (
        "outs[0]|outs[1]|arrays of one framework",
        lambda x: ats.merge([x.floats(3, 2), x.other(3, 2)], [x.floats(3), x.floats(3)]),
    ),
    "VJP across frameworks": (
        "weights: |grad: |arrays of one framework",
        lambda x: ats.softmax_pullback(x.floats(3), x.other(3)),
    ),
}

CASES = (
    *cases(_MERGE),
    *cases(_JACOBIAN),
    *cases(_COST),
    *cases({ArgumentError: _REGISTRY | _STATS | _MAPS | _THREADS, ShapeError: _HEAT_MAPS}),
    *(case for name, rest in _SUMMARIES.items() for case in cases(_summary(name, rest))),
    *cases({FrameworkError: _TORCH}, only="torch"),
    *cases(_NUMPY, only="numpy"),
    *cases({FrameworkError: _OWN_WORDS}, same=False),
)
