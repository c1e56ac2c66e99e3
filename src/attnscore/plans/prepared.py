"""Keys prepared once for many calls: a score's computations from keys alone, and the score that takes their result."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any, final

from attnscore import backends, scores
from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import shown
from attnscore.base.layout import AxisLayout, may_equal
from attnscore.errors import ArgumentError, ShapeError, message, with_shapes
from attnscore.problem.problem import check_arrays
from attnscore.scores.base import describe, with_arrays
from attnscore.scores.base import prepare_keys as prepare_keys_of


@final
@dataclass(frozen=True, eq=False, repr=False)
class PreparedKeys:
    """Keys after all that a score computes from keys alone, and the score that is left; from `prepare_keys`.

    ``attend(query, prepared, value)`` is ``attend(query, prepared.key, value, score=prepared.score)``, and so for all
    functions that take keys. A pytree in JAX.

    Parameters
    ----------
    key : (..., key, h)
        The array itself: later calls see writes to it.
    score : the score of a query with these keys

    Examples
    --------
    Location-sensitive attention: features of each key, such as the convolved weights of the last step, as a further
    term of an additive score.

    >>> import numpy as np, attnscore as ats
    >>> score = ats.Additive(np.ones(3), np.ones((3, 4)), np.ones((3, 2)))
    >>> prepared = ats.prepare_keys(score, np.ones((5, 2)))
    >>> ats.attend(np.ones((1, 4)), prepared + np.zeros((5, 3)), np.ones((5, 1)))
    array([[1.]])
    """

    key: Array
    score: Any

    def __post_init__(self) -> None:
        backends.register_pytree(PreparedKeys)

    def __repr__(self) -> str:
        return describe(self)

    def __add__(self, features: Array) -> PreparedKeys:
        """Return these keys with features (..., key, h) added: a further term of an additive score."""
        return PreparedKeys(self.key + features, self.score)

    def unpack(self, score: Any) -> tuple[Array, Any]:
        """Return the key and the score of a call; raise ArgumentError where the call names a score of its own."""
        # The default cannot be distinguished from the same name given by the caller.
        if not isinstance(score, str) or score != "scaled_dot":
            hint = "leave score= out, or pass prepare_keys(score, key) of the keys themselves"
            expected = f"nothing, as the keys are prepared for {self.score!r}"
            raise ArgumentError(message("score", expected, shown(score), hint=hint))
        return self.key, self.score


def prepare_keys(score: Any, key: Array, *, head_axis: int = -3) -> PreparedKeys:
    """Compute all that a score computes from the keys alone, for many calls with the same keys.

    A recurrent decoder attends to the same keys at each step. With an additive score that projects them in each call a
    step costs O(m dim h) for m keys; with prepared keys O(m h).

    - ``Additive(w_v, W_q, W_k, bias)``: W_k k, and ``Additive(w_v, W_q, None, bias)``
    - ``Bilinear(W)``: W k, and ``Dot()``
    - ``Cosine(scale)``: k over its norm, and ``Cosine(scale, unit_keys=True)``
    - ``Temperature`` and ``SoftCap``: the keys that the wrapped score prepares, and the wrapper around its new score
    - all other built-in scores: the keys and the score, as nothing is computed from the keys alone
    - a custom score: the result of its method ``prepare_keys(ops, key)``, else the keys and the score

    Parameters
    ----------
    score : a score object, or a registered name
    key : (..., key, dim_k)
        As in `attend`. With parameters per query head the prepared keys have all query heads, and so must the values.
    head_axis : -3, or -2 for the layout (batch, length, head, dim)

    Returns
    -------
    prepared : PreparedKeys
        In the dtype of `key`. In frameworks with autodiff, gradients flow to `key` and the parameters.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, FrameworkError, ArgumentError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> score = ats.Additive(np.ones(3), np.ones((3, 4)), np.ones((3, 2)))
    >>> key, value = np.ones((5, 2)), np.ones((5, 1))
    >>> prepared = ats.prepare_keys(score, key)
    >>> prepared
    PreparedKeys(key=<(5, 3) float64>, score=Additive(w_v=<(3,) float64>, W_q=<(3, 4) float64>))
    >>> query = np.ones((1, 4))
    >>> bool(np.allclose(ats.attend(query, prepared, value), ats.attend(query, key, value, score=score)))
    True
    """
    if isinstance(key, PreparedKeys):
        raise ArgumentError(message("key", "an array", shown(key), hint="these keys are prepared already"))
    key = backends.variable_value(key)
    ops = backends.of({"key": key})
    backends.check_not_recorded(ops, "prepare_keys")
    score = with_arrays(scores.resolve(score), backends.variable_value)
    layout = check_arrays(ops, {"key": key}, head_axis)
    scores.check_score_arrays(ops, score, key)
    # A compiler records the operations below with autocast's own casts; otherwise autocast is applied once, here.
    with ops.numeric_scope() if backends.compiled() is None else contextlib.nullcontext():
        (key,) = ops.autocast(key) if backends.compiled() is None else (key,)
        canonical = layout.to_canonical(ops, key, is_query=False)
        try:
            prepared, remaining_score = prepare_keys_of(ops, score, canonical)
        except ShapeError as error:
            raise ShapeError(with_shapes(str(error), {"key": ops.shape(key)})) from None
        backends.register_pytree(type(remaining_score))
        if prepared is canonical:
            return PreparedKeys(key, remaining_score)
        prepared = ops.astype(_on_caller_axes(ops, layout, prepared, score), ops.dtype(key))
        return PreparedKeys(prepared, remaining_score)


def _on_caller_axes(ops: Backend, layout: AxisLayout, x: Array, score: Any) -> Array:
    """View prepared keys, which have all query heads where the parameters have, on the caller's axes."""
    expected = layout.score_shape.key_len
    shape: tuple[Any, ...] = getattr(x, "shape", ())
    got = shape[-2] if len(shape) > 1 else shown(x)
    if not may_equal(got, expected):
        raise ShapeError(message(f"prepare_keys of {type(score).__name__}", f"{expected} keys, as it was given", got))
    if not layout.score_shape.has_heads and x.shape[-4] * x.shape[-3] != 1:
        expected_parameters = "parameters without an axis of heads, as the key has none"
        raise ShapeError(message("score", expected_parameters, f"those of {x.shape[-4] * x.shape[-3]} heads"))
    score_shape = dataclasses.replace(layout.score_shape, heads=x.shape[-4], groups=x.shape[-3])
    return dataclasses.replace(layout, score_shape=score_shape).from_canonical(ops, x)
