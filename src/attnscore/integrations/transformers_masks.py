"""Masks of Hugging Face transformers models as mask objects.

- No array of queries by keys is made: transformers' functions of indices become masks of this library where their
  parts are known (causal, windows, chunks, packed sequences, padding), else a `MaskFunction`.
- A part is recognised by the code object of transformers' function, after one check that this function gives the
  expected mask on a few pairs.
- transformers and models handle masks as tensors, so an object is a tensor subclass, and becomes a plain tensor in the
  first operation on it.
- One query, and everything that is traced, gets the tensor that transformers itself would make. So does an operation on
  the object; `generate` applies none, and a compiled forward takes the object as it is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import CodeType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

import attnscore as ats
from attnscore.backends.torch import map_leaves
from attnscore.base.cache import BoundedCache
from attnscore.errors import ArgumentError, message
from attnscore.masks import Mask

# Functions of (batch, head, query, key) indices, as transformers writes them.
Pattern = Callable[..., Any]


class StructuredMask(Tensor):
    """Boolean tensor (batch, 1, query, key) that holds a mask object until the first operation on it."""

    structure: Mask
    _make_plain: Callable[[], Tensor | None]

    @staticmethod
    def __new__(
        cls, structure: Mask, make_plain: Callable[[], Tensor | None], shape: tuple[int, ...], device: Any
    ) -> Any:
        """Make a tensor without memory; `make_plain` makes the tensor that transformers itself would make."""
        tensor: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        tensor.structure, tensor._make_plain = structure, make_plain
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch calls it so
        if func is torch.ops.aten.detach.default:
            # Gradient checkpointing does that to all arguments of a layer.
            mask = args[0]
            return StructuredMask(mask.structure, mask._make_plain, tuple(mask.shape), mask.device)

        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and any(
            isinstance(x, Tensor) and x.is_floating_point() for x in args
        ):
            # Scores plus a boolean mask: an attention of the model's own, which expects zeros and minus infinities.
            _refuse("scores plus the mask")

        def plain(x: Any) -> Any:
            if not isinstance(x, StructuredMask):
                return x
            # torch has disabled its transforms here, and a custom pattern is run by vmap.
            with torch.overrides.enable_reentrant_dispatch():
                return x._make_plain()

        return func(*map_leaves(plain, args), **map_leaves(plain, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # see there
        return f"StructuredMask({self.structure!r}, shape={tuple(self.shape)})"


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Pattern | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **others: Any,
) -> Tensor | None:
    """Return the mask of a model (batch, 1, query, key), as transformers calls it; `attention_forward` gets it.

    It is a `StructuredMask`; a plain tensor for one query and under a compiler; None where nothing is masked. For
    models without sdpa attention, whose code expects zeros and minus infinities, it is the mask of eager attention. A
    model that computes attention itself and would misread a boolean mask is an ArgumentError.

    - `q_offset` and `kv_offset` are the positions of the first query and key. A cache of fixed size counts its queries
      in a tensor.
    - `mask_function` is the pattern, as one of transformers' functions of indices; None: causal. With `use_vmap` it
      takes scalars, no arrays.
    - `attention_mask` (batch, key) is the padding: True where there is a token.
    - `allow_is_causal_skip` and `allow_is_bidirectional_skip` are False where the caller asks for a mask even if every
      pair is unmasked.
    """
    from transformers import masking_utils

    takes_booleans = _takes_booleans(type(others.get("config")))
    pattern = mask_function or masking_utils.causal_mask_function
    others |= {"use_vmap": use_vmap, "device": device}
    if q_length == 1 or not takes_booleans:
        make = masking_utils.sdpa_mask if takes_booleans else masking_utils.eager_mask
        if takes_booleans:
            # As small as the padding; generate() gives the same to a model that it compiles.
            others["allow_is_causal_skip"] = allow_is_causal_skip
        plain: Tensor | None = make(
            batch_size, q_length, kv_length, q_offset, kv_offset, pattern, attention_mask,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, **others,
        )  # fmt: skip
        return plain
    if isinstance(q_offset, Tensor) and not masking_utils.is_tracing(q_offset):
        # The cache updates it in place. Reading it from a device would synchronise.
        q_offset = int(q_offset) if q_offset.is_cpu else q_offset.clone()

    def make_plain() -> Tensor | None:
        dense: Tensor | None = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, pattern, attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **others,
        )  # fmt: skip
        return dense

    tensors: list[Tensor | None] = [x for x in (q_offset, attention_mask) if isinstance(x, Tensor)]
    if any(map(masking_utils.is_tracing, tensors or [None])):
        return make_plain()
    place = _Place(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    parts, complete = _parts(pattern, place)
    if not complete:
        parts.append(ats.MaskFunction(_of_arrays(pattern, place, use_vmap)))
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and not (padding.is_cpu and bool(padding.all())):
        parts.append(ats.KeyPadding(padding[:, kv_offset : kv_offset + kv_length]))
    if not parts and allow_is_bidirectional_skip:
        return None
    structure = reduce(lambda a, b: a & b, parts) if parts else ats.SlidingWindow(align="top_left")
    mask: Tensor = StructuredMask(structure, make_plain, (batch_size, 1, q_length, kv_length), device)
    return mask


# By class of configuration: looking at all names of its module took 8% of the time of a decoding step.
_TAKES_BOOLEANS: BoundedCache[bool] = BoundedCache(64)


def _takes_booleans(config: type) -> bool:
    """Return whether models with a class of configuration leave boolean masks as they are."""
    if (cached := _TAKES_BOOLEANS.get(config)) is not None:
        return cached
    module = sys.modules.get(config.__module__.replace(".configuration_", ".modeling_"))
    return module is None or _TAKES_BOOLEANS.put(config, _module_takes_booleans(module))


# Constant to Dynamo, which does not trace the cache.
_takes_booleans._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _module_takes_booleans(module: Any) -> bool:
    """Return whether the models of a module leave boolean masks as they are; refuse those that compute attention.

    Models for sdpa or flex attention leave them, whose masks are no zeros and minus infinities either.
    """
    from transformers import AttentionInterface, PreTrainedModel

    names = vars(module).values()
    classes = [x for x in names if isinstance(x, type) and x.__module__ == module.__name__]
    if not any(x is AttentionInterface or isinstance(x, AttentionInterface) for x in names):
        for layer in classes:
            if "Attention" in layer.__name__:
                _refuse(layer.__name__)
    models: list[Any] = [x for x in classes if issubclass(x, PreTrainedModel)]
    return not models or any(x._supports_sdpa or x._supports_flex_attn for x in models)


def _refuse(got: str) -> NoReturn:
    expected, hint = "a model whose layers call transformers' AttentionInterface", 'attn_implementation="eager"'
    raise ArgumentError(message("attn_implementation", expected, got, hint=hint))


@dataclass(frozen=True)
class _Place:
    """Position of a block of queries and keys in the whole sequence."""

    batch: int
    queries: int
    keys: int
    q_offset: Any
    kv_offset: int
    device: Any

    @property
    def offset(self) -> Any:
        return self.q_offset - self.kv_offset

    @property
    def at_start(self) -> bool:
        """Whether the block is the whole sequence, so that indices are positions."""
        return isinstance(self.q_offset, int) and self.q_offset == 0 == self.kv_offset and self.queries == self.keys


def _of_arrays(pattern: Pattern, place: _Place, use_vmap: bool) -> Pattern:
    """Return a pattern over positions as a function of the indices in a block."""
    from transformers import masking_utils

    def evaluate(*index: Any) -> Any:
        # NumPy indices come from a caller that materializes the mask.
        batch, head, query, key = (torch.as_tensor(x, device=place.device) for x in index)
        # transformers evaluates head 0 alone.
        index = (batch, head[:, :1], query + place.q_offset, key + place.kv_offset)
        if not use_vmap:
            return pattern(*index)
        mapped = pattern
        for axis in (3, 2, 1, 0):
            mapped = torch.vmap(mapped, in_dims=tuple(0 if i == axis else None for i in range(4)))
        with masking_utils.TransformGetItemToIndex():
            return mapped(*(x.flatten() for x in index))

    evaluate.__name__ = getattr(pattern, "__name__", evaluate.__name__)
    return evaluate


# ---------------------------------------------------------------- known patterns


def _parts(pattern: Pattern, place: _Place) -> tuple[list[Mask], bool]:
    """Return masks of which each hides only pairs that `pattern` hides, and whether together they hide all of these."""
    kind, arguments = _kind(pattern)
    masks: list[Mask] | None = None
    match kind:
        case "and":
            return _parts_of_all(arguments["mask_functions"], place)
        case "causal":
            masks = [ats.Causal(offset=place.offset)]
        case "full":
            masks = []
        case "window" | "two-sided":
            width = arguments["sliding_window"]
            if isinstance(width, int) and width >= 1:
                both = ats.SlidingWindow(width, width, offset=place.offset)
                masks = [both if kind == "two-sided" else ats.SlidingWindow(left=width - 1, offset=place.offset)]
        case "chunks":
            masks = _chunks(arguments["chunk_size"], arguments["left_padding"], place)
        case "packed":
            ids = arguments["packed_sequence_mask"]
            masks = [_sequences(ids)] if place.at_start and ids.shape == (place.batch, place.queries) else None
    return ([], False) if masks is None else (masks, True)


def _parts_of_all(patterns: tuple[Pattern, ...], place: _Place) -> tuple[list[Mask], bool]:
    """Return the same of a conjunction of patterns."""
    masks: list[Mask] = []
    complete = True
    packed = (arguments["packed_sequence_mask"] for kind, arguments in map(_kind, patterns) if kind == "packed")
    ids = next(packed, None)
    for pattern in patterns:
        kind, arguments = _kind(pattern)
        if kind == "remapped" and ids is not None and _counts_within(arguments["position_ids"], ids, place):
            inner = arguments["mask_function"]
            parts, is_equal = _parts(inner, place) if _depends_on_distance(inner) else ([], False)
        else:
            parts, is_equal = _parts(pattern, place)
        masks += parts
        complete = complete and is_equal
    return masks, complete


def _sequences(ids: Tensor) -> Mask:
    """Return the mask of sequences with these ids: by cumulative lengths, a few numbers, where one row holds all."""
    if len(ids) != 1 or not ids.is_cpu:
        return ats.Documents(ids)
    steps = np.diff(ids[0].numpy())
    if (steps < 0).any():
        return ats.Documents(ids)
    return ats.Packed([0, *(np.flatnonzero(steps) + 1).tolist(), ids.shape[1]])


def _chunks(size: int, left_padding: Tensor, place: _Place) -> list[Mask] | None:
    """Return the mask of chunks counted from each row's first token; None where `left_padding` has other rows."""
    if left_padding.shape != (place.batch,):
        return None
    first = left_padding[:, None]

    def ids(count: int, offset: Any) -> Tensor:
        # Not negative left of the first token, where chunks are counted backwards.
        chunk: Tensor = (torch.arange(count, device=first.device) + offset - first) // size
        return chunk + (first + size - 1) // size

    return [ats.Documents(ids(place.queries, place.q_offset), ids(place.keys, place.kv_offset))]


def _counts_within(positions: Tensor, ids: Tensor, place: _Place) -> bool:
    """Return whether positions increase by one inside each sequence, so that distances equal distances of indices."""
    if not place.at_start or positions.shape != ids.shape:
        return False
    return bool((ids.diff().bool() | (positions.diff() == 1)).all())


def _depends_on_distance(pattern: Pattern) -> bool:
    kind, arguments = _kind(pattern)
    if kind == "and":
        return all(map(_depends_on_distance, arguments["mask_functions"]))
    return kind in ("causal", "full", "window", "two-sided")


def _kind(pattern: Pattern) -> tuple[str, dict[str, Any]]:
    """Return which of transformers' functions made `pattern`, and with which arguments."""
    kind = _kinds().get(getattr(pattern, "__code__", None), "")
    if not kind:
        return "", {}
    names, cells = pattern.__code__.co_freevars, pattern.__closure__ or ()
    return kind, {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


@lru_cache(maxsize=1)
def _kinds() -> dict[CodeType | None, str]:
    """Return the code objects of transformers' functions that give the expected mask on a few pairs."""
    from transformers import masking_utils as masking

    ids = torch.tensor([[0, 0, 1, 1, 1, 2]])
    places = torch.tensor([[0, 1, 0, 1, 2, 0]])
    q, k = torch.arange(6)[:, None], torch.arange(6)
    causal, zero = masking.causal_mask_function, torch.zeros((), dtype=torch.long)
    left = torch.tensor([1])
    expected_masks: dict[str, Callable[[], tuple[Pattern, Tensor]]] = {
        "causal": lambda: (causal, k <= q),
        "full": lambda: (masking.bidirectional_mask_function, k == k + 0 * q),
        "window": lambda: (masking.sliding_window_overlay(2), k > q - 2),
        "two-sided": lambda: (masking.sliding_window_bidirectional_overlay(2), (q - k).abs() <= 2),
        "chunks": lambda: (masking.chunked_overlay(2, left), (k - 1) // 2 == (q - 1) // 2),
        "packed": lambda: (masking.packed_sequence_mask_function(ids), ids[0][q] == ids[0][k]),
        "remapped": lambda: (masking.remap_positions_for_packed_sequence(causal, places), places[0][k] <= places[0][q]),
        "and": lambda: (masking.and_masks(causal, masking.sliding_window_overlay(2)), (k <= q) & (k > q - 2)),
    }
    kinds: dict[CodeType | None, str] = {}
    for kind, make in expected_masks.items():
        # A part that this release of transformers lacks, or calls differently, is evaluated like any function.
        with contextlib.suppress(AttributeError, TypeError):
            pattern, expected = make()
            if torch.equal(pattern(zero, zero, q, k).expand(6, 6), expected):
                kinds[pattern.__code__] = kind
    return kinds
