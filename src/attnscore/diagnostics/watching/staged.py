"""Watches of frameworks whose calls may come from compiled programs: a call arrives with the number of its run.

Requirements:
- the program of a model asks when it begins whether its step is sampled, and sends nothing where it is not;
- queries and keys come to the host as NumPy arrays, and every framework has its statistics from `sums`;
- of a call inside ``vmap``, which arrives with more axes in front, each part counts;
- calls that a backward pass computes again (checkpointing, rematerialisation) are recorded once;
- a loop over layers in one program gives each iteration a name: "name", "name #2", ...;
- wrappers and programs outlive a watch: without one that runs, their calls are ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attnscore.diagnostics.watching.base import WHOLE, Step, Watch, next_name
from attnscore.diagnostics.watching.padding import named_arguments, padding_like
from attnscore.diagnostics.watching.sums import (
    Array,
    Call,
    NotRecorded,
    Scores,
    describe_error,
    merged,
    sums_of,
)

# Runs whose end never came, as of a program that failed, are forgotten when there are more than these.
_MAX_OPEN_RUNS = 64
# Seconds that `stop` waits for programs that run.
_LONGEST_WAIT = 1.0
NOT_SAMPLED, NEWEST = -1, -2
"""Numbers in the place of a run's: no watch samples the step; the run that has begun last."""
# Arguments of models, (batch, token): 1 (True) at tokens. In masked modelling "mask" has the tokens that are hidden.
_REAL = ("attention_mask", "padding_mask", "input_mask")


Build: TypeAlias = Callable[[dict[str, NDArray[Any]]], Call | Scores]
"""Makes an attention call of its arrays on the host."""


@dataclass(frozen=True, eq=False)
class Site:
    """One attention call in the code of a model: its arrays, and the call that they make on the host."""

    arrays: dict[str, Any]
    build: Build


@dataclass
class Run:
    """One run of a model: the step of each watch that samples it."""

    key: Hashable
    steps: list[tuple[StagedWatch, Step]]
    real: NDArray[np.bool_] | None = None


class StagedWatch(Watch):
    """Watch whose steps are runs of a model, in Python or in a compiled program."""

    padding_names = f"{' or '.join(_REAL)} (1 at tokens)"
    key: Hashable = None
    """Key of the model in compiled programs: watches with one key get the calls of the same programs."""
    values: Values
    """How the framework's arrays come to the host."""

    def _install(self) -> None:
        with _LOCK:
            _WATCHES.append(self)
            try:
                self._start_observing(self._alike())
                self.values.watched(tuple(watch.key for watch in _WATCHES))
            except BaseException:
                self._uninstall()
                raise

    def _uninstall(self) -> None:
        if not HERE.is_called_back:  # a program that waits for itself would wait forever
            self.values.wait()
            until = time.monotonic() + _LONGEST_WAIT
            while any(watch is self for run in tuple(_RUNS.values()) for watch, _ in run.steps):
                if time.monotonic() > until:  # a program has failed, or the model is being called
                    break
                time.sleep(0.001)
        with _LOCK:
            if self in _WATCHES:
                _WATCHES.remove(self)
            for number, run in list(_RUNS.items()):
                run.steps = [(watch, step) for watch, step in run.steps if watch is not self]
                if not run.steps:
                    del _RUNS[number]
            self._stop_observing(self._alike())
            self.values.watched(tuple(watch.key for watch in _WATCHES))

    def _alike(self) -> list[Self]:
        """Return the watches of this class that run."""
        return [watch for watch in _WATCHES if isinstance(watch, type(self))]

    @abstractmethod
    def _start_observing(self, watches: list[Self]) -> None:
        """Let the framework's functions report calls; `watches` of this class run, with this one."""

    @abstractmethod
    def _stop_observing(self, watches: list[Self]) -> None:
        """Undo `_start_observing`; these `watches` of this class still run."""


_LOCK = threading.RLock()
_WATCHES: list[StagedWatch] = []
_RUNS: dict[int, Run] = {}
_NUMBERS = itertools.count()


def watches_of(key: Hashable) -> list[StagedWatch]:
    """Return the watches that run, of models with a key."""
    return [watch for watch in tuple(_WATCHES) if watch.key == key]


# ------------------------------------------------------------ on the host, while a program runs


def begin(key: Hashable, real: NDArray[Any] | None = None) -> int:
    """Begin a run of a model; return its number, or `NOT_SAMPLED` where no watch samples it."""
    with _LOCK:
        steps = [(watch, watch._begin_step()) for watch in watches_of(key)]
        steps = [(watch, step) for watch, step in steps if step.sampled]
        if not steps:
            return NOT_SAMPLED
        # Below 2^31, which programs pass on.
        number = next(_NUMBERS) % 2**30
        _RUNS[number] = Run(key, steps, None if real is None else np.asarray(real) != 0)
        while len(_RUNS) > _MAX_OPEN_RUNS:
            del _RUNS[next(iter(_RUNS))]
        return number


def receive(
    number: int, key: Hashable, name: str, build: Build, arrays: dict[str, Any], axis_counts: Sequence[int]
) -> None:
    """Record the attention call `name` of a run; `axis_counts` are those of its arrays in the code of the model."""
    with _LOCK:
        newest = (run for run in reversed(_RUNS.values()) if run.key == key)
        run = next(newest, None) if number == NEWEST else _RUNS.get(number)
    if run is None:  # it has ended: a backward pass computes the call again
        return
    for watch, step in tuple(run.steps):
        try:
            with here(is_recorded=True):
                sums = _unrolled_sums(build, arrays, axis_counts, run.real, watch.thresholds.saturated_weight)
        except Exception as error:  # recording must never break the model
            watch._count_unseen(name, describe_error(error))
            continue
        module, _, of_code = name.partition(" #")
        with watch._lock:
            # With the iteration of a loop, the calls of a module have an order that does not depend on the program's.
            for iteration in itertools.count():
                call = (module, iteration, int(of_code or 1))
                if call not in step.sums:
                    step.sums[call] = sums
                elif not _are_same(step.sums[call], sums):  # else computed again before the end of the run
                    continue
                break


def end(number: int, failed: bool = False) -> None:
    """End a run: its numbers join the records, unless the model has failed."""
    with _LOCK:
        run = _RUNS.pop(number, None)
    if run is not None and not failed:
        for watch, step in run.steps:
            # Numbers of calls have no gaps, also where a loop's body was traced twice.
            counts: Counter[str] = Counter()
            names = {call: next_name(counts, call[0]) for call in sorted(step.sums, key=lambda call: call[1:])}
            step.sums = {names[call]: sums for call, sums in step.sums.items()}
            watch._finish(step)


def _unrolled_sums(
    build: Build, arrays: dict[str, Any], axis_counts: Sequence[int], real: NDArray[np.bool_] | None, weight: float
) -> dict[str, Array]:
    """Return the sums of a call; a call with more axes in front than in the code is summed over its parts."""
    numbers = [np.asarray(x) for x in arrays.values()]
    lead = np.broadcast_shapes(*(x.shape[: x.ndim - axes] for x, axes in zip(numbers, axis_counts, strict=True)))
    real = None if real is None or not 2 <= real.ndim <= len(lead) + 2 else real
    lead = lead if real is None else np.broadcast_shapes(lead, real.shape[:-2])

    def with_lead(x: NDArray[Any], axes: int) -> NDArray[Any]:
        return np.broadcast_to(x, (*lead, *x.shape[x.ndim - axes :]))

    numbers = [with_lead(x, axes) for x, axes in zip(numbers, axis_counts, strict=True)]
    tokens = None if real is None else with_lead(real, 2)
    parts = []
    for place in np.ndindex(*lead):
        call = build(dict(zip(arrays, (np.asarray(x[place]) for x in numbers), strict=True)))
        parts.append(sums_of(call, None if tokens is None else tokens[place], weight))
    return merged(parts)


def _are_same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    """Return whether sums come from the same queries and keys: equal but for the rounding of a second program."""
    names = ("rows", "logit_mean", "logit_variance", "log_sum_exp", "entropy", "max_logit", "first_key")
    return all(
        one[name].shape == other[name].shape and np.allclose(one[name], other[name], rtol=1e-5, equal_nan=True)
        for name in names
    )


# ------------------------------------------------------------ in Python, while a model is called or traced


@dataclass
class Root:
    """Call of a watched model that this thread is in."""

    key: Hashable
    number: Any = NOT_SAMPLED
    """The number of its run: an integer, or the framework's own value of a program that is traced."""
    names: dict[int, str] = field(default_factory=dict)
    """Names of modules by their ids."""
    modules: dict[str, Any] = field(default_factory=dict)
    """The modules by their names, where a framework makes copies of them."""
    copies: list[Any] = field(default_factory=list)
    """Copies that have names: held, so that their ids are not used again."""
    entered: set[str] = field(default_factory=set)
    has_programs: bool = False
    """Whether parts of an eager call are programs, which report later."""
    calls: Counter[str] = field(default_factory=Counter)
    state: Any = None
    """State of the framework's tracing where the call began; None: it is made eagerly."""


class Values:
    """How a framework's arrays come to the host: at once, as here, or when the program runs that is traced now."""

    def state(self, leaves: Iterable[Any]) -> Any:
        """Return the state of tracing in which a model is called with these arrays; None where it is called eagerly."""
        return None

    def is_abstract(self, x: Any) -> bool:
        """Return whether an array stands for values of a later run."""
        return False

    def numpy(self, x: Any) -> NDArray[Any]:
        """Return the values of an array, detached."""
        return np.asarray(x)

    def wait(self) -> None:
        """Wait until programs that run have reported their calls."""

    def watched(self, keys: tuple[Hashable, ...]) -> None:
        """Take the keys of all watches that run now."""

    def reason_against(self, key: Hashable) -> str | None:
        """Return why a program that is traced now cannot report; None where it can."""
        return None

    def probe(self, tree: Any) -> Any:
        """Return a number taken from a tree of arrays: what it is sent to runs after the arrays are computed."""
        return 0

    def following(self, tree: Any, number: Any) -> Any:
        """Return arrays unchanged, but computed after `number`; here the framework keeps the order of the code."""
        return tree

    def send(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Call a function of the host when the program runs, and return its number; here there are no programs."""
        raise NotRecorded("symbolic tensors, which hold no numbers")

    def send_if_sampled(self, function: Callable[..., Any], number: Any, *arrays: Any) -> Any:
        """Call a function with the number of a run and arrays when the program runs, if the run is sampled."""
        raise NotRecorded("symbolic tensors, which hold no numbers")

    # Under ``vmap`` a function of the host gets arrays, and gives numbers, with more axes in front.

    def begin(self, key: Hashable, inputs: Any, real: Any) -> tuple[Any, Any]:
        """Begin a run of a model when the program runs; return its number, and the inputs that follow from it."""

        def call(probe: Any, *masks: Any) -> Any:
            shape = np.broadcast_shapes(np.shape(probe), *(x.shape[:-2] for x in masks))
            return np.full(shape, begin(key, *map(np.asarray, masks)), np.int32)

        number = self.send(call, self.probe(inputs), *([] if real is None else [real]))
        return number, self.following(inputs, number)

    def report(self, root: Root, name: str, site: Site, out: Any) -> Any:
        """Record a call when the program runs; return its output, which follows from that."""
        # Not the site or the root, whose values belong to a trace that ends before the program runs.
        key, build, names = root.key, site.build, tuple(site.arrays)
        arrays = site.arrays.values()
        axis_counts = [len(x.shape) for x in arrays]

        def call(number: Any, *arrays: Any) -> Any:
            receive(int(np.ravel(number)[0]), key, name, build, dict(zip(names, arrays, strict=True)), axis_counts)
            leads = (x.shape[: x.ndim - axes] for x, axes in zip(arrays, axis_counts, strict=True))
            return np.zeros(np.broadcast_shapes(np.shape(number), *leads), np.int32)

        # A value of another trace must not go into a program that may run again: use the last run that began.
        number = root.number if self.state(arrays) == root.state else NEWEST
        return self.following(out, self.send_if_sampled(call, number, *arrays))

    def end(self, root: Root, out: Any) -> Any:
        """End a run when the program has computed its output; return the output, which follows from that."""

        def call(number: Any, probe: Any) -> Any:
            with here(is_called_back=True):
                end(int(np.ravel(number)[0]))
            return np.zeros(np.broadcast_shapes(np.shape(number), np.shape(probe)), np.int32)

        return self.following(out, self.send_if_sampled(call, root.number, self.probe(out)))


class _ThreadState(threading.local):
    """State of this thread: in which call of a model and module, in a recorded call, called by a program."""

    def __init__(self) -> None:
        self.root: Root | None = None
        self.name = WHOLE
        self.is_recorded = False
        self.is_called_back = False
        self.entered = contextlib.ExitStack()
        """The framework's context for the watches that this thread has started or stopped last."""


HERE = _ThreadState()


@contextlib.contextmanager
def here(**state: Any) -> Iterator[None]:
    """Change parts of this thread's state for a while."""
    before = {name: getattr(HERE, name) for name in state}
    vars(HERE).update(state)
    try:
        yield
    finally:
        vars(HERE).update(before)


def call_model(
    values: Values,
    root: Root,
    function: Callable[..., Any],
    inputs: tuple[Any, Any],
    leaves: Sequence[Any],
    real: Any = None,
) -> Any:
    """Call a model, as ``function(*arguments, **options)`` of its `inputs`, as a step of its watches.

    `leaves` are the values in the inputs; `real` is (batch, token), not 0 where there is a token, or None.
    """
    arguments, options = inputs
    key, root.state = root.key, values.state(leaves)
    if root.state is not None:
        if (why := values.reason_against(key)) is not None:
            for watch in watches_of(key):
                watch._count_unseen(WHOLE, why)
            return function(*arguments, **options)
        root.number, (arguments, options) = values.begin(key, inputs, real)
        with here(root=root, name=WHOLE):
            out = function(*arguments, **options)
        return values.end(root, out)
    root.number = number = begin(key, None if real is None else values.numpy(real))
    try:
        with here(root=root, name=WHOLE):
            out = function(*arguments, **options)
    except BaseException:
        end(number, failed=True)
        raise
    if root.has_programs:
        values.wait()
    end(number)
    return out


def record(
    values: Values, make_site: Callable[..., Site], original: Callable[..., Any], /, *arguments: Any, **options: Any
) -> Any:
    """Call an attention function, and record the call as the site that `make_site` makes of its arguments."""
    if (root := HERE.root) is None:
        return original(*arguments, **options)
    with here(is_recorded=True):
        out = original(*arguments, **options)
    if root.state is None and root.number == NOT_SAMPLED:
        return out
    name = next_name(root.calls, HERE.name)
    try:
        site = make_site(*arguments, **options)
        if root.state is None and not any(map(values.is_abstract, site.arrays.values())):
            arrays = {name: values.numpy(x) for name, x in site.arrays.items()}
            receive(root.number, root.key, name, site.build, arrays, [x.ndim for x in arrays.values()])
            return out
        root.has_programs = True
        return values.report(root, name, site, out)
    except Exception as error:  # recording must never break the model
        for watch in watches_of(root.key):
            watch._count_unseen(name, describe_error(error))
        return out


def real_tokens(key: Hashable, function: Any, inputs: tuple[Any, Any]) -> Any:
    """Return (batch, token), not 0 where there is a token, from the arguments of a model; None without a mask.

    The watches of the model get the name of an argument that only looks like one.
    """
    named = named_arguments(function, inputs)
    dictionaries = [x for x in named.values() if isinstance(x, Mapping)]
    for name, mapping in itertools.product(_REAL, (named, *dictionaries)):
        mask = mapping.get(name)
        if len(getattr(mask, "shape", ())) == 2 and not any(kind in str(mask.dtype) for kind in ("float", "complex")):
            return mask
    suspects = {str(name): x for mapping in (*dictionaries, named) for name, x in mapping.items()}
    for watch in watches_of(key):
        watch.unchecked_padding = padding_like(suspects)
    return None
