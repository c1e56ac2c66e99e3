"""Bad input gets the same errors in the same words as in NumPy: every row of ``bad_input``, and layers' own."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import mxnet as mx
import numpy as onp
import pytest

import attnscore as ats


def _rows() -> Any:
    # Some rows are about torch, which is not here; none of those is run.
    torch = types.ModuleType("torch")
    torch.float32, torch.dtype, torch.Tensor = None, type, type("Tensor", (), {})  # type: ignore[attr-defined]
    sys.modules["torch"] = torch
    try:
        import bad_input
        import bad_input.absurd
    finally:
        del sys.modules["torch"]
    return bad_input


bad_input = _rows()
absurd = bad_input.absurd
# An array of MXNet answers for & before a mask is asked, and it has no complex numbers.
NOT_OURS = ("array & mask", "custom score of complex numbers, auto", "custom score of complex numbers, dense")
ROWS = [
    pytest.param(case, id=f"{case.error.__name__}-{case.name}")
    for case in bad_input.CASES
    if not case.only and case.name not in NOT_OURS
]


class CannotHoldError(Exception):
    """MXNet has no such dtype: no caller has such an array."""


class Maker(bad_input.Maker):
    """Arrays of MXNet."""

    def __init__(self) -> None:
        super().__init__("mxnet")

    def array(self, values: Any, dtype: str | None = None) -> Any:
        host = onp.asarray(values)
        dtype = dtype or ("float32" if host.dtype.kind == "f" else host.dtype.name)
        try:
            with mx.util.np_shape(True):
                x = mx.np.array(host, dtype=dtype)
        except (KeyError, TypeError) as error:
            raise CannotHoldError(dtype) from error
        self.made.append((x, onp.array(self.host(x))))
        return x

    def other(self, *shape: int) -> Any:
        return onp.ones(shape)

    @staticmethod
    def host(x: Any) -> onp.ndarray:
        return x.asnumpy()


def caught(case: Any, maker: Any) -> Any:
    try:
        with pytest.raises(ats.AttnscoreError) as found:
            case.call(maker)
    except CannotHoldError:
        return None
    return found.value


@pytest.mark.parametrize("case", ROWS)
def test_bad_input(case: Any) -> None:
    maker = Maker()
    error = caught(case, maker)
    if error is None:
        return
    text = str(error)
    assert type(error) is case.error, f"{type(error).__name__}: {text}"
    words = [word.replace("MINE", "mxnet").replace("OTHER", "numpy") for word in case.words]
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
    assert maker.unchanged()
    if case.same:
        assert text == str(caught(case, bad_input.Maker("numpy")))


def test_all_rows_but_those_of_complex_numbers_can_be_made() -> None:
    missing = [row.values[0].name for row in ROWS if caught(row.values[0], Maker()) is None]
    assert not [name for name in missing if not re.search("complex|16-bit|unsigned|u?int16", name)], missing


ABSURD = [(row, name) for row in absurd.CALLS.values() for name in row.arguments]


@pytest.mark.parametrize(
    ("call", "argument"), ABSURD, ids=[f"{c}-{n}" for c, r in absurd.CALLS.items() for n in r.arguments]
)
def test_absurd_values_get_an_error_of_ours(call: Any, argument: str) -> None:
    wrong = []
    for name, make in absurd.VALUES.items():
        maker = Maker()
        try:
            given = call.good(maker) | {argument: make(maker)}
        except CannotHoldError:
            continue
        try:
            # Who has an array of length 0 has called npx.set_np().
            with mx.util.np_shape(name == "nothing in it"):
                call.function(**given)
        except ats.AttnscoreError:
            pass
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        if not maker.unchanged():
            wrong.append(f"{name}: changed an array")
    assert not wrong, "\n".join(wrong)
