"""Wrappers in the place of a framework's functions, bound to every name that a module has for them, for a while.

Requirements:
- names are replaced where they are bound in modules, and methods in their classes; nothing else is touched;
- after `restore`, a name that is bound to a wrapper is bound to its original, in modules that were imported meanwhile
  too, and a name that another library has bound since is left alone;
- wrappers that remain somewhere (under another library's function, in a table) only call their originals from then on.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

# Wrappers that report calls now, and every wrapper that still exists.
ACTIVE: set[Callable[..., Any]] = set()
_WRAPPERS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


class Rebinding:
    """Functions and methods of one framework that wrappers replace.

    `is_bypassed` says whether wrappers only call their originals now, as while statistics are computed. A wrapper is
    called with the original first.
    """

    def __init__(self, is_bypassed: Callable[[], bool]) -> None:
        self._is_bypassed = is_bypassed
        self._wrappers: set[Callable[..., Any]] = set()
        self._methods: dict[tuple[Any, str], None] = {}

    def wrapped(self, original: Any, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `wrapper` with the original and its arguments, until `restore`."""
        is_bypassed = self._is_bypassed

        @functools.wraps(original)
        def called(*arguments: Any, **options: Any) -> Any:
            if is_bypassed() or called not in ACTIVE:
                return original(*arguments, **options)
            return wrapper(original, *arguments, **options)

        ACTIVE.add(called)
        self._wrappers.add(called)
        _WRAPPERS.add(called)
        return called

    def bind_functions(self, pairs: Iterable[tuple[Any, Callable[..., Any]]], but: tuple[str, ...] = ()) -> None:
        """Bind wrappers to the names of functions, but in modules whose name begins with one of `but`."""
        _rebind([(original, self.wrapped(original, wrapper)) for original, wrapper in pairs], but)

    def bind_methods(self, methods: Iterable[tuple[Any, str, Callable[..., Any]]]) -> None:
        """Bind wrappers to methods: class, name, wrapper."""
        for owner, name, wrapper in methods:
            self._methods[owner, name] = None
            setattr(owner, name, self.wrapped(getattr(owner, name), wrapper))

    def restore(self) -> None:
        """Bind every name of a wrapper to its original, and let all wrappers only call their originals."""
        ACTIVE.difference_update(self._wrappers)
        self._wrappers.clear()
        if wrappers := [wrapper for wrapper in _WRAPPERS if wrapper not in ACTIVE]:
            _rebind([(wrapper, _unwrapped(wrapper)) for wrapper in wrappers])
        for owner, name in self._methods:
            bound = vars(owner).get(name)
            if bound in _WRAPPERS and bound not in ACTIVE:
                original = _unwrapped(bound)
                if any(vars(base).get(name) is original for base in owner.__mro__[1:]):
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def is_active(function: Any, original: Any) -> bool:
    """Return whether `function` is a wrapper of `original` that reports calls now."""
    return function in ACTIVE and function.__wrapped__ is original


def _unwrapped(function: Any) -> Any:
    """Return the function under wrappers that only call their originals."""
    while function in _WRAPPERS and function not in ACTIVE:
        function = function.__wrapped__
    return function


def _rebind(pairs: Iterable[tuple[Any, Any]], but: tuple[str, ...] = ()) -> None:
    """Replace old by new under every name that a loaded module has for it (also ``from ... import``)."""
    new_of = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()):
        if isinstance(module, type(sys)) and not str(getattr(module, "__name__", "")).startswith(but):
            names = vars(module)  # setattr may be a module's own
            for name, value in list(names.items()):
                if id(value) in new_of:
                    names[name] = new_of[id(value)]
