"""The score of a custom class as functions in Triton's language, for the kernel on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final, get_args

from attnscore import backends
from attnscore.base.arguments import check_choice, shown
from attnscore.errors import ArgumentError, message
from attnscore.scores.base import arrays_of

PairValue = Literal["product", "squared_distance", "channels"]


@final
@dataclass(frozen=True, eq=False)
class TritonTile:
    """Scores of a custom class and their derivatives in Triton's language: the result of a method ``triton_tile()``.

    - `of` = "product": s = value(q . k); "squared_distance": s = value(|q - k|^2)
    - `of` = "channels": s = sum_c value(q_c, k_c)

    The functions work elementwise on float32 tiles of numbers that broadcast. The kernel does the rest: masks, bias,
    dropout, caps, statistics, and all gradients.

    Parameters
    ----------
    of : {"product", "squared_distance", "channels"}
        Argument of `value`.
    value : function decorated with ``triton.jit``
        Called as ``value(x, *parameters)``, or ``value(a, b, *parameters)`` for channels a of the query, b of the key.
    gradient : function decorated with ``triton.jit``
        Called in the same way; returns a tuple: the derivatives of `value` with respect to x, or a and b, and then to
        each parameter that is an array, in order.
    parameters : tuple of str
        Fields of the score that both functions take: numbers, or arrays () or (heads,).
    channel_parameters : tuple of str
        Arrays (dim,) or (heads, dim), of which the functions take the number of a channel, after `parameters`. For
        `of` = "channels" alone.

    Raises
    ------
    ArgumentError
        `value` or `gradient` is not decorated, or takes another number of arguments.

    Examples
    --------
    In a module with the two functions, as `docs/how-to-add-a-score.md` shows::

        class Laplace:
            def triton_tile(self):
                return ats.TritonTile("channels", laplace, laplace_gradient, channel_parameters=("rate",))
    """

    of: PairValue
    value: Any
    gradient: Any
    parameters: tuple[str, ...] = ()
    channel_parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("of", self.of, get_args(PairValue))
        if self.channel_parameters and self.of != "channels":
            raise ArgumentError(message("channel_parameters", f'() for of="{self.of}"', self.channel_parameters))
        taken = ("a", "b") if self.of == "channels" else ("x",)
        expected = f"a function ({', '.join((*taken, *self.names))}) decorated with triton.jit"
        for name in ("value", "gradient"):
            function = getattr(self, name)
            # Functions for Triton's compiler and for its interpreter both have this attribute.
            arguments = getattr(function, "arg_names", None)
            if arguments is None:
                raise ArgumentError(message(name, expected, shown(function)))
            if len(arguments) != len(taken) + len(self.names):
                raise ArgumentError(message(name, expected, f"{function.__name__}({', '.join(arguments)})"))

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, in the order of the functions' arguments."""
        return (*self.parameters, *self.channel_parameters)


def triton_tile_of(score: Any) -> TritonTile | None:
    """Return ``score.triton_tile()``, checked against the score's fields; None where there is no such method."""
    if not hasattr(score, "triton_tile"):
        return None
    owner = f"triton_tile of {type(score).__name__}"
    tile = score.triton_tile()
    if not isinstance(tile, TritonTile):
        raise ArgumentError(message(owner, "a TritonTile", shown(tile)))
    for name in tile.names:
        value = getattr(score, name, None)
        is_array = backends.is_array(value)
        if not is_array and (name in tile.channel_parameters or not isinstance(value, (int, float))):
            kind = "an array" if name in tile.channel_parameters else "a number or an array"
            raise ArgumentError(message(owner, f"{kind} in the score's field {name!r}", shown(value)))
    if missing := [name for name in arrays_of(score) if name not in tile.names]:
        raise ArgumentError(message(owner, f"all arrays of the score as parameters, {missing} too", tile.names))
    return tile
