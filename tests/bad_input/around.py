"""What lies around attend(): VJPs, merge, Jacobians, costs, the registry, statistics, maps, threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import attnscore as ats
from attnscore import ArgumentError, DtypeError, FrameworkError, MaskError, ShapeError
from bad_input.table import Maker, case


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


_PULLBACK = (
    case(
        "a VJP where there is autodiff",
        FrameworkError,
        "query|a NumPy array|torch|Hint: attend() is differentiable",
        lambda x: ats.attend_vjp(**x.three()),
        only="torch",
    ),
    case(
        "attend_vjp(None)", FrameworkError, "query|an array", lambda x: ats.attend_vjp(None, None, None), only="numpy"
    ),
    case(
        "grad_out of another shape",
        ShapeError,
        "grad_out|(2, 3, 6)|got (2, 3, 4)",
        lambda x: _pull(x, x.floats(2, 3, 4)),
        only="numpy",
    ),
    case("grad_out a number", ShapeError, "grad_out|(2, 3, 6)|got ()", lambda x: _pull(x, 1.0), only="numpy"),
    case(
        "grad_out complex",
        DtypeError,
        "grad_out|floating|complex",
        lambda x: _pull(x, x.complexes(2, 3, 6)),
        only="numpy",
    ),
    case("grad_out as text", FrameworkError, "grad_out|array|str", lambda x: _pull(x, "text"), only="numpy"),
    case(
        "grad_log_sum_exp of another shape",
        ShapeError,
        "grad_log_sum_exp|(2, 3)|got (2, 3, 1)",
        lambda x: _pull(x, None, x.floats(2, 3, 1)),
        only="numpy",
    ),
    case(
        "grad_entropy of another shape",
        ShapeError,
        "grad_entropy|(2, 3)|got (3,)",
        lambda x: _pull(x, None, grad_entropy=x.floats(3), stats=True),
        only="numpy",
    ),
    case(
        "grad_entropy without an entropy",
        ArgumentError,
        "grad_entropy|return_stats|entropy",
        lambda x: _pull(x, None, grad_entropy=x.floats(2, 3)),
        only="numpy",
    ),
    case(
        "custom score without a gradient",
        FrameworkError,
        "score|known in NumPy|cumsum|Hint|tile_gradient|PyTorch",
        lambda x: ats.attend_vjp(**x.three(score=_Own()))[1](x.floats(2, 3, 6)),
        only="numpy",
    ),
)

_MERGE = (
    case("merge of nothing", ArgumentError, "outs|log_sum_exps|at least one", lambda x: ats.merge([], [])),
    case(
        "more outs than log-sum-exps",
        ArgumentError,
        "outs, log_sum_exps|as many of one as of the other|(2, 1)",
        lambda x: ats.merge([x.floats(3, 2)] * 2, [x.floats(3)]),
    ),
    case("merge(None)", FrameworkError, "outs|list|NoneType", lambda x: ats.merge(None, None)),
    case("merge of numbers", FrameworkError, "outs|list|int", lambda x: ats.merge(3, 4)),
    case(
        "merge of lists",
        FrameworkError,
        "outs[0]|an array|list",
        lambda x: ats.merge([[1.0, 2.0]], [x.floats(2)]),
    ),
    case(
        "outs of two shapes",
        ShapeError,
        "outs[1]|(..., query, value_dim)|(3, 4)|outs[0] (3, 2)",
        lambda x: ats.merge([x.floats(3, 2), x.floats(3, 4)], [x.floats(3), x.floats(3)]),
    ),
    case(
        "log-sum-exp with an axis too many",
        ShapeError,
        "log_sum_exps[0]|without its last axis|(3, 2) and (3, 1)",
        lambda x: ats.merge([x.floats(3, 2)], [x.floats(3, 1)]),
    ),
    case(
        "merge of whole numbers",
        DtypeError,
        "outs[0]|a floating dtype|int64",
        lambda x: ats.merge([x.ints(3, 2)], [x.floats(3)]),
    ),
    case(
        "merge of whole-number log-sum-exps",
        DtypeError,
        "log_sum_exps[0]|a floating dtype|int64",
        lambda x: ats.merge([x.floats(3, 2)], [x.ints(3)]),
    ),
    case(
        "merge across frameworks",
        FrameworkError,
        "outs[0]|outs[1]|arrays of one framework",
        lambda x: ats.merge([x.floats(3, 2), x.other(3, 2)], [x.floats(3), x.floats(3)]),
        same=False,
    ),
)

_JACOBIAN = (
    case("Jacobian of None", FrameworkError, "weights|an array|NoneType", lambda x: ats.softmax_jacobian(None)),
    case("Jacobian of a list", FrameworkError, "weights|an array|list", lambda x: ats.softmax_jacobian([0.5, 0.5])),
    case(
        "Jacobian of a number",
        ShapeError,
        "weights|1 axis or more|weights ()",
        lambda x: ats.softmax_jacobian(x.array(1.0)),
    ),
    case(
        "Jacobian of whole numbers",
        DtypeError,
        "weights|a floating dtype|int64",
        lambda x: ats.softmax_jacobian(x.ints(3)),
    ),
    case(
        "VJP of another shape",
        ShapeError,
        "grad|the shape of weights|got (2, 4)|weights (2, 3)",
        lambda x: ats.softmax_pullback(x.floats(2, 3), x.floats(2, 4)),
    ),
    case(
        "VJP across frameworks",
        FrameworkError,
        "weights: |grad: |arrays of one framework",
        lambda x: ats.softmax_pullback(x.floats(3), x.other(3)),
        same=False,
    ),
    case(
        "VJP of another dtype",
        DtypeError,
        "grad|the dtype of weights (float32)|got float64",
        lambda x: ats.softmax_pullback(x.floats(3), x.floats(3, dtype="float64")),
    ),
    case(
        "VJP of whole numbers",
        DtypeError,
        "weights|a floating dtype|int64",
        lambda x: ats.softmax_pullback(x.ints(3), x.ints(3)),
    ),
    case(
        "VJP of numbers",
        ShapeError,
        "weights|1 axis or more|weights ()",
        lambda x: ats.softmax_pullback(x.array(1.0), x.array(1.0)),
    ),
)


def _cost(score: Any = "dot", **given: Any) -> Any:
    return ats.cost(score, **{"query_len": 3, "key_len": 5, "dim": 4} | given)


_COST = (
    case("cost of an unknown score", ArgumentError, "score|one of|dot|additive|'dott'", lambda x: _cost("dott")),
    case(
        "cost of an additive score without its size",
        ArgumentError,
        'num_hiddens|a whole number, 0 or more, for score="additive"|got None|Hint: the h of W_q (h, dim)',
        lambda x: _cost("additive"),
    ),
    case(
        "hidden units of a product",
        ArgumentError,
        'num_hiddens|None unless score="additive"|got 8|Hint: a score object has its own sizes',
        lambda x: _cost("bilinear", num_hiddens=8),
    ),
    case(
        "hidden units of a score object",
        ArgumentError,
        'num_hiddens|None unless score="additive"|got 8|Hint: a score object has its own sizes',
        lambda x: _cost(ats.Sum(), num_hiddens=8),
    ),
    case(
        "more parameters than can be counted",
        ArgumentError,
        "dim, key_dim, num_hiddens|sizes of which NumPy makes an array",
        lambda x: _cost("additive", num_hiddens=2**62),
    ),
    case("cost of a class", ArgumentError, "score|Hint: Dot(...) makes one", lambda x: _cost(ats.Dot)),
    case(
        "cost of unequal vectors",
        ShapeError,
        "key|vectors of the dimension of query (4)|got 7",
        lambda x: _cost(key_dim=7),
    ),
    *(
        case(
            f"{name}={number!r}",
            ArgumentError,
            f"{name}|a whole number, 0 or more|got {number!r}",
            lambda x, name=name, number=number: _cost(**{name: number}),
        )
        for name in ("query_len", "key_len", "dim", "key_dim", "value_dim", "heads", "batch")
        for number in (-1, 1.5, "many", True)
    ),
    *(
        case(
            f"num_hiddens={number!r}",
            ArgumentError,
            f"num_hiddens|a whole number, 0 or more|got {number!r}",
            lambda x, number=number: _cost("additive", num_hiddens=number),
        )
        for number in (-1, 1.5, "many", True)
    ),
    case(
        "cost without a length",
        ArgumentError,
        "query_len|a whole number, 0 or more|got None",
        lambda x: _cost(query_len=None),
    ),
)

_REGISTRY = (
    case("a name that is taken", ArgumentError, "name|a new name|'dot'", lambda x: ats.register_score("dot", ats.Sum)),
    case("a name that is a number", ArgumentError, "name|a name|got 3", lambda x: ats.register_score(3, ats.Sum)),
    case("no name", ArgumentError, "name|a name|got ''", lambda x: ats.register_score("", ats.Sum)),
    case(
        "a class that scores nothing",
        ArgumentError,
        "cls|a class with a method tile(ops, query, key)|int",
        lambda x: ats.register_score("whole", int),
    ),
    case(
        "a score instead of its class",
        ArgumentError,
        "cls|a class with a method tile(ops, query, key)|Dot()",
        lambda x: ats.register_score("point", ats.Dot()),
    ),
    case(
        "None instead of a class",
        ArgumentError,
        "cls|a class with a method tile|None",
        lambda x: ats.register_score("none", None),
    ),
    case(
        "register a class that needs arguments",
        ArgumentError,
        "cls|makes a score without arguments|Bilinear: missing a required argument: 'W'"
        "|Hint: register_score('luong', lambda: Bilinear(...))",
        lambda x: ats.register_score("luong", ats.Bilinear),
    ),
    case(
        "register a function that needs arguments",
        ArgumentError,
        "cls|makes a score without arguments|_capped: missing a required argument: 'cap'",
        lambda x: ats.register_score("capped", _capped),
    ),
    *(
        case(
            f"a registered {kind} that needs arguments after all, {how}",
            ArgumentError,
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
    ),
    case(
        "a registered function that makes no score",
        ArgumentError,
        "score|a registered name or a score object with a method tile|got 5",
        lambda x: (ats.register_score("five", _five), x.attend(score="five")),
    ),
)


def _stats(x: Maker, *names: str) -> ats.AttentionStats:
    return x.attend(return_stats=names)[1]


_STATS = (
    case(
        "effective keys without the entropy",
        ArgumentError,
        "return_stats|entropy",
        lambda x: _stats(x, "max_weight").effective_keys(),
    ),
    case(
        "Jacobian trace without its sums",
        ArgumentError,
        "return_stats|sum_weights|sum_sq_weights",
        lambda x: _stats(x, "sum_weights").jacobian_trace(),
    ),
    case(
        "saturation without the largest weight",
        ArgumentError,
        "return_stats|max_weight",
        lambda x: _stats(x, "entropy").saturated(),
    ),
    case("summary without sums", ArgumentError, "return_stats|sum_weights", lambda x: _stats(x, "entropy").summary()),
    *(
        case(
            f"threshold={threshold!r}",
            ArgumentError,
            f"threshold|a number in (0, 1]|got {threshold!r}",
            lambda x, threshold=threshold: _stats(x, "max_weight").saturated(threshold),
        )
        for threshold in (0, 1.5, -0.1, float("nan"), "most", None)
    ),
)

_HEAT_MAPS = (
    case(
        "a heat map of one axis",
        ShapeError,
        "matrices|(3,)",
        lambda x: _heatmaps(x.floats(3)),
    ),
    case(
        "a heat map of five axes", ShapeError, "matrices|(1, 1, 1, 2, 3)", lambda x: _heatmaps(x.floats(1, 1, 1, 2, 3))
    ),
    case(
        "more titles than maps",
        ShapeError,
        "titles|2",
        lambda x: _heatmaps(x.floats(1, 2, 3, 3), titles=["a", "b", "c"]),
    ),
)


def _heatmaps(matrices: Any, **given: Any) -> Any:
    from attnscore.plotting import show_heatmaps

    return show_heatmaps(matrices, "Keys", "Queries", **given)


def _maps(x: Maker, function: Any, *rest: Any, **given: Any) -> Any:
    """A map of the weights of query (2, 3, 4) and key (2, 5, 4)."""
    pair = {"query": x.floats(2, 3, 4), "key": x.floats(2, 5, 4)} | given
    return function(pair.pop("query"), pair.pop("key"), *rest, **pair)


_MAPS = (
    *(
        case(
            f"k={k!r}",
            ArgumentError,
            f"k: |a whole number from 1 to the number of keys (5)|got {k!r}",
            lambda x, k=k: _maps(x, ats.top_weights, k),
        )
        for k in (0, -1, 6, 1.5, "two", None, True)
    ),
    *(
        case(
            f"bins={bins!r}",
            ArgumentError,
            f"bins|two positive whole numbers (rows, columns)|got {bins!r}",
            lambda x, bins=bins: _maps(x, ats.pooled_weights, bins),
        )
        for bins in (3, (1,), (2, 0), (1.5, 2), (1, 2, 3), "ab", None)
    ),
    *(
        row
        for name, function, rest in (
            ("top_weights", ats.top_weights, (2,)),
            ("pooled_weights", ats.pooled_weights, ()),
            ("key_mass", ats.key_mass, ()),
        )
        for row in (
            case(
                f"{name}(None)",
                FrameworkError,
                "query|an array|NoneType",
                lambda x, f=function, rest=rest: f(None, None, *rest),
            ),
            case(
                f"{name} of unequal vectors",
                ShapeError,
                "key|(2, 3, 4)|(2, 5, 7)",
                lambda x, f=function, rest=rest: _maps(x, f, *rest, key=x.floats(2, 5, 7)),
            ),
            case(
                f"{name} past the keys",
                MaskError,
                "valid_lens|numbers from 0 to 5|got 9",
                lambda x, f=function, rest=rest: _maps(x, f, *rest, valid_lens=[1, 9]),
            ),
        )
    ),
)

_THREADS = tuple(
    case(
        f"n={n!r} threads",
        ArgumentError,
        f"n: |a whole number from 1 to 1024|got {n!r}",
        lambda x, n=n: ats.set_num_threads(n),
    )
    for n in (0, 1025, -1, 1.5, "all", None, True)
)

CASES = (*_PULLBACK, *_MERGE, *_JACOBIAN, *_COST, *_REGISTRY, *_STATS, *_HEAT_MAPS, *_MAPS, *_THREADS)
