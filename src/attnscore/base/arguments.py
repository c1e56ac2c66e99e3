"""Arguments of a call, and checks of plain ones: numbers, whole numbers, flags, names. A check names the argument."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from attnscore.errors import ArgumentError, UnknownArgument, message

Function = TypeVar("Function", bound=Callable[..., Any])


class CallArguments(NamedTuple):
    """Arguments of one call that its plan reads; the plan is built for the other arguments, the options.

    ``tuple.__new__`` makes it in 0.14 us, its own constructor in 0.27, a frozen dataclass's in 2: a tiny call takes 24
    (2026-11-25).
    """

    query: Any
    key: Any
    value: Any
    score: Any
    mask: Any
    valid_lens: Any
    bias: Any
    sink: Any
    seed: Any


# What to write in place of an argument of other libraries, or of another object of this one. {} stands for the value; |
# separates alternatives: those are shown whose argument the function has.
_INSTEAD = {
    **dict.fromkeys(("scale", "scaling", "sm_scale", "softmax_scale"), "score=ats.ScaledDot({})"),
    **dict.fromkeys(("temperature", "T"), 'score=ats.Temperature("scaled_dot", {})'),
    **dict.fromkeys(("softcap", "cap", "logits_soft_cap"), 'score=ats.SoftCap("scaled_dot", {})'),
    "bandwidth": "score=ats.Gaussian({})",
    "is_causal": 'mask=ats.Causal(align="top_left")',
    **dict.fromkeys(("causal", "use_causal_mask"), "mask=ats.Causal()"),
    **dict.fromkeys(("attn_mask", "attention_mask"), "mask={} if it is boolean|bias={} if it is added to the scores"),
    "key_padding_mask": "mask=ats.KeyPadding.from_ignore({})",
    **dict.fromkeys(("window", "window_size", "sliding_window"), "mask=ats.SlidingWindow(left={} - 1, right=0)"),
    **dict.fromkeys(("need_weights", "output_attentions", "return_attention_scores"), "return_weights={}"),
    **dict.fromkeys(("embed_dim", "d_model", "hidden_size"), "num_hiddens={}"),
    **dict.fromkeys(("lens", "lengths", "key_lens", "seq_lens"), "valid_lens={}"),
}


def reject_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise UnknownArgument for arguments that a function does not have, in Python's words, with a hint."""
    if not unknown:
        return
    name, x = next(iter(unknown.items()))
    names = [*inspect.signature(function).parameters]
    alternatives = [text for text in _INSTEAD.get(name, "").split("|") if text.partition("=")[0] in names]
    if alternatives:
        replacement = ", ".join(alternatives).replace("{}", repr(x) if isinstance(x, (int, float)) else name)
        hint = "leave it out" if x is None or x is False else replacement
    else:
        hint = did_you_mean(name, names) or f"it takes {', '.join(names)}"
    raise UnknownArgument(f"{function.__qualname__}() got an unexpected keyword argument {name!r}. Hint: {hint}")


def hides_unknown(function: Function) -> Function:
    """Leave ``**unknown``, which is there for `reject_unknown`, out of a function's signature."""
    signature = inspect.signature(function)
    *others, _ = signature.parameters.values()
    function.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return function


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller of the calling function of an old spelling that works until 0.2."""
    warnings.warn(f"{old} is now {new}; the old spelling works until 0.2", DeprecationWarning, stacklevel=3)


def renamed_argument(old: str, new: str) -> Callable[[Function], Function]:
    """Return a decorator that takes the argument `new` by its `old` name too, with a warning."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if old in options and new not in options:
                warn_renamed(f"{function.__name__}({old}=)", f"{function.__name__}({new}=)")
                options[new] = options.pop(old)
            return function(*arguments, **options)

        return cast(Function, call)

    return decorate


def closest(x: object, names: Iterable[str]) -> str | None:
    """Return the name most like `x`, whatever its case, hyphens and underscores; None where none is like it."""
    letters = x.lower().replace("-", "").replace("_", "") if isinstance(x, str) else ""
    by_letters = {name.lower().replace("_", ""): name for name in names}
    matches = difflib.get_close_matches(letters, by_letters, 1)
    return by_letters[matches[0]] if matches else None


def did_you_mean(x: object, names: Iterable[str]) -> str | None:
    """Return the hint that `x` may stand for another name."""
    name = closest(x, names)
    return None if name is None else f"did you mean {name!r}?"


def is_number(x: object) -> bool:
    """Whether `x` is a real number of Python or a NumPy scalar, and not a flag."""
    return isinstance(x, Real) and not isinstance(x, bool)


def is_whole(x: object) -> bool:
    """Whether `x` is a whole number of Python or a NumPy scalar, and not a flag."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def shown(x: object) -> str:
    """Format a value for a message: an array with axes by type and shape, a scalar by its repr, all else cut short."""
    shape = getattr(x, "shape", None)
    if shape is not None and not isinstance(x, type):
        return f"{type(x).__name__} of shape {tuple(shape)}" if tuple(shape) else f"{x!r}"
    text = repr(x)
    return text if len(text) <= 60 else text[:57] + "..."


def check_positive(name: str, x: Any, *, if_array: str | None = None) -> float:
    """Return a finite number above 0; `if_array` is the hint if `x` is an array, such as a learned parameter."""
    expected = "a finite number above 0"
    if not is_number(x) or not _is_finite(x) or not x > 0:
        if if_array is not None and not is_number(x) and hasattr(x, "shape") and not isinstance(x, type):
            # Without its value: a tracer has none, and its repr has many lines.
            raise ArgumentError(message(name, expected, f"an array ({type(x).__name__})", hint=if_array))
        raise ArgumentError(message(name, expected, shown(x)))
    return float(x)


def check_number(name: str, x: Any) -> float:
    """Return a finite number."""
    if not is_number(x) or not _is_finite(x):
        raise ArgumentError(message(name, "a number (finite)", shown(x)))
    return float(x)


# Not a cached function, of which torch.compile warns.
_LARGEST = {name: float(np.finfo(name).max) for name in ("float16", "float32", "float64")}


def largest_of(dtype: str) -> float:
    """Return the largest number of a floating dtype, infinity where a Python float overflows (long double)."""
    return _LARGEST.get(dtype, math.inf)


def check_overflow(name: str, x: Any, dtype: str, factor: float, smallest: float | None = None) -> float:
    """Return `factor`, which a call computes from its argument `x`; raise ArgumentError if it overflows in `dtype`.

    The message gives the range in which `x` is valid: from `smallest` on, where the factor is an inverse; None: up to
    the largest number of the dtype.
    """
    largest = largest_of(dtype)
    if math.isfinite(factor) and abs(factor) <= largest:
        return factor
    bound = f"{largest:.3g} or less in size" if smallest is None else f"{smallest:.3g} or more"
    raise ArgumentError(message(name, f"a number that works in {dtype}, {bound}", shown(float(x))))


def check_count(name: str, x: Any) -> int:
    """Return a whole number, 0 or more."""
    if not is_whole(x) or x < 0:
        raise ArgumentError(message(name, "a whole number, 0 or more", shown(x)))
    return int(x)


def check_flag(name: str, x: Any) -> bool:
    """Check a flag, and return it as a bool."""
    if not isinstance(x, (bool, np.bool_)):
        raise ArgumentError(message(name, "True or False", shown(x)))
    return bool(x)


def check_choice(name: str, x: Any, choices: Sequence[str], *, hint: str | None = None) -> str:
    """Return one of the names in `choices`; the message has `hint` where `x` resembles none of them."""
    if not isinstance(x, str) or x not in choices:
        hint = did_you_mean(x, choices) or hint
        raise ArgumentError(message(name, "one of " + ", ".join(choices), shown(x), hint=hint))
    return x


def _is_finite(x: Real) -> bool:
    try:
        # torch.compile cannot trace math.isfinite.
        return -math.inf < float(x) < math.inf
    except OverflowError:
        return False
