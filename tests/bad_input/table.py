"""A row of the tables of bad input, and the arrays that rows are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import attnscore as ats


def _tensorflow(host: np.ndarray, dtype: str) -> Any:
    import tensorflow as tf  # costs seconds

    return tf.constant(host.astype(dtype))


def _jax(host: np.ndarray, dtype: str) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(host.astype(dtype))


_AS: dict[str, Callable[[np.ndarray, str], Any]] = {
    "numpy": lambda host, dtype: host.astype(dtype),
    "torch": lambda host, dtype: torch.tensor(host, dtype=getattr(torch, dtype)),
    "tensorflow": _tensorflow,
    "jax": _jax,
}


class Maker:
    """Makes arrays of one framework and remembers them, so that a test can see whether a call changed any."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.made: list[tuple[Any, np.ndarray]] = []

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """The values as an array; floats are float32 unless `dtype` says otherwise."""
        host = np.asarray(values)
        dtype = dtype or ("float32" if host.dtype.kind == "f" else host.dtype.name)
        x = _AS[self.framework](host, dtype)
        self.made.append((x, np.array(self.host(x))))
        return x

    def floats(self, *shape: int, dtype: str = "float32") -> Any:
        """Numbers in [-1, 1), the same in every framework."""
        return self.array(np.random.default_rng(0).uniform(-1, 1, shape), dtype)

    def ints(self, *shape: int) -> Any:
        return self.array(np.arange(int(np.prod(shape))).reshape(shape) % 3, "int64")

    def bools(self, *shape: int) -> Any:
        return self.array(np.arange(int(np.prod(shape))).reshape(shape) % 3 > 0)

    def complexes(self, *shape: int) -> Any:
        return self.array(np.ones(shape), "complex64")

    def other(self, *shape: int) -> Any:
        """An array of another framework."""
        return (torch if self.framework == "numpy" else np).ones(shape)

    def named(self, word: str) -> str:
        """A word of a row: MINE is this framework, OTHER the framework of `other`."""
        return {"MINE": self.framework, "OTHER": "torch" if self.framework == "numpy" else "numpy"}.get(word, word)

    @staticmethod
    def host(x: Any) -> np.ndarray:
        return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x)

    def unchanged(self) -> bool:
        """Whether every array still holds what it held when it was made."""
        return all(np.array_equal(self.host(x), before, equal_nan=True) for x, before in self.made)

    def three(self, **given: Any) -> dict[str, Any]:
        """Query (2, 3, 4), key (2, 5, 4), value (2, 5, 6), and what is given beside or instead of them."""
        names = {"query": (2, 3, 4), "key": (2, 5, 4), "value": (2, 5, 6)}
        return {name: self.floats(*shape) for name, shape in names.items() if name not in given} | given

    def attend(self, **given: Any) -> Any:
        return ats.attend(**self.three(**given))

    def square(self, **given: Any) -> Any:
        """Self-attention of one sequence of 4, two axes."""
        x = self.floats(4, 2)
        return ats.attend(x, x, x, **given)

    def heads(self, query: int, key: int, value: int | None = None, **given: Any) -> Any:
        """attend() with so many heads: query (2, heads, 3, 4), key and value (2, heads, 5, 4)."""
        value = key if value is None else value
        return ats.attend(self.floats(2, query, 3, 4), self.floats(2, key, 5, 4), self.floats(2, value, 5, 4), **given)

    def weights(self, **given: Any) -> Any:
        return ats.attention_weights(**{"query": self.floats(2, 3, 4), "key": self.floats(2, 5, 4)} | given)

    def softmax(self, *shape: int, **given: Any) -> Any:
        return ats.masked_softmax(self.floats(*(shape or (2, 3, 5))), **given)


class Traced(Maker):
    """Makes arrays inside a graph of TensorFlow or a program of JAX: their shapes and dtypes are known, numbers not."""

    def error_of(self, case: Case) -> Exception | None:
        """What a row raises while the graph or program is made."""
        found: list[Exception] = []

        def body(flag: Any) -> Any:
            self._flag = flag
            try:
                case.call(self)
            except Exception as error:
                found.append(error)
            return flag

        if self.framework == "tensorflow":
            import tensorflow as tf

            tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec([], tf.bool))
        else:
            import jax

            jax.make_jaxpr(body)(True)
        return found[0] if found else None

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """The values as a traced array."""
        x = super().array(values, dtype)
        if self.framework == "tensorflow":
            import tensorflow as tf

            return tf.where(self._flag, x, x)
        import jax.numpy as jnp

        return jnp.where(self._flag, x, x)

    @staticmethod
    def host(x: Any) -> np.ndarray:
        """Nothing: there are no numbers that could have been changed."""
        return np.zeros(0)


@dataclass(frozen=True)
class Case:
    """One mistake."""

    name: str
    error: type[ats.AttnscoreError]
    words: tuple[str, ...]
    """What the message must hold: the argument, what was expected, what came, shapes, a hint (see `Maker.named`)."""
    call: Callable[[Maker], Any]
    only: str = ""
    """The one framework in which this mistake can be made."""
    same: bool = True
    """Whether every framework says exactly the same (not where the message quotes a value's own repr)."""
    but: str = ""
    """The one framework that says something else, because its own operator or limit comes first."""


Rows = dict[str, tuple[str, Callable[[Maker], Any]]]
"""Mistakes by name: the words of the message, separated by ``|``, and the call."""
Errors = dict[type[ats.AttnscoreError], Rows]
"""Mistakes by the class of their error."""


def cases(errors: Errors, *, only: str = "", same: bool = True, but: str = "") -> tuple[Case, ...]:
    """A case for each mistake."""
    return tuple(
        Case(name, error, tuple(words.split("|")), call, only, same, but)
        for error, rows in errors.items()
        for name, (words, call) in rows.items()
    )
