"""The tile table of the GPU kernels: the shipped one is whole, and errors name the malformed entry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnscore.errors import FileError
from attnscore.kernels.triton import tiles
from attnscore.kernels.triton.tiles import Entry, Tile, kernels_of, tile_of
from bench.gpu_tune import text_of


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    """A table is read once in a process."""
    yield
    tiles._tile_of.cache_clear()


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_the_shipped_table_is_whole(architecture: int) -> None:
    for form in tiles.FORMS:
        for kernel in kernels_of(form):
            for dtype in tiles.DTYPES:
                assert [tile_of(kernel, architecture, form, dtype, dim) for dim in (16, *tiles.DIMS)]


def test_an_architecture_has_the_tiles_of_the_latest_before_it() -> None:
    """Consumer GPUs of a later generation have the shared memory of earlier ones, and their tiles."""
    found = {arch: tile_of("forward", arch, "inner", "bfloat16", 64) for arch in (80, 86, 90, 103, 120, 121)}
    assert found[80] == found[86] == found[120] == found[121] == Tile(128, 64, 8, 2)
    assert found[90] == found[103] == Tile(64, 128, 4, 3)
    assert tile_of("forward", 90, "inner", "bfloat16", 16) == tile_of("forward", 90, "inner", "bfloat16", 32)


def test_the_shipped_table_is_written_as_the_command_writes_one() -> None:
    text = tiles.SHIPPED.read_text()
    assert text_of(tiles.read(tiles.SHIPPED), json.loads(text)["origin"], {120: 80, 121: 80}) == text


def test_a_table_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, tile = Entry(86, "forward", "inner", "bfloat16", 64), Tile(64, 32, 4, 1)
    path = tmp_path / "own.json"
    path.write_text(text_of({entry: tile}, "by hand"))
    monkeypatch.setenv(tiles.VARIABLE, str(path))
    assert tile_of("forward", 86, "inner", "bfloat16", 64) == tile
    # On that architecture alone, and for that dtype and dimension alone.
    shipped = tiles.read(tiles.SHIPPED)
    assert tile_of("forward", 89, "inner", "bfloat16", 64) == shipped[entry._replace(architecture=80)]
    assert tile_of("forward", 86, "inner", "float16", 64) == shipped[entry._replace(architecture=80, dtype="float16")]
    assert tile_of("forward", 86, "inner", "bfloat16", 128) == shipped[entry._replace(architecture=80, dim=128)]


def document(numbers: Any = None, *, path: str = "sm_90/forward/inner/bfloat16/64") -> dict[str, Any]:
    """One entry."""
    found: Any = [64, 64, 8, 2] if numbers is None else numbers
    for key in reversed(path.split("/")):
        found = {key: found}
    return {"origin": "by hand", **found}


WHERE = "sm_90 / forward / inner / bfloat16 / 64: expected "
ADDITIVE, STORED = "sm_90/forward/additive/float32/64", "sm_90/store_gradients/additive/float32/64"
MALFORMED = {
    "no-object": ([], "table: expected an object, got list"),
    "no-architecture": (document(path="hopper/forward/inner/bfloat16/64"), "hopper: expected origin, or an archi"),
    "no-alias": ({"sm_120": "sm_80"}, "sm_120: expected an object, or the name of an architecture that has one, got"),
    "shallow": (document(path="sm_90/forward"), r"sm_90 / forward: expected an object, got \[64"),
    "kernel": (document(path="sm_90/backward/inner/bfloat16/64"), "as kernel one of forward, d_query, d_key, store"),
    "form": (document(path="sm_90/forward/dot/bfloat16/64"), "sm_90 / forward / dot / bfloat16 / 64: .* as form one"),
    "kernel-of-form": (document(path="sm_90/d_key/additive/float32/64"), "for this form one of forward, d_query, st"),
    "dtype": (document(path="sm_90/forward/inner/float64/64"), "as dtype one of float16, bfloat16, float32"),
    "dim": (document(path="sm_90/forward/inner/bfloat16/48"), "as dim one of 32, 64, 128, 256"),
    "dim-word": (document(path="sm_90/forward/inner/bfloat16/any"), "inner / bfloat16 / any: expected as dim one of"),
    "three-numbers": (document([64, 64, 8]), WHERE + r"four whole numbers.*got \[64, 64, 8\]"),
    "text": (document([64, 64, "8", 2]), WHERE + "four whole numbers"),
    "boolean": (document([64, 64, True, 2]), WHERE + "four whole numbers"),
    "no-power": (document([48, 64, 8, 2]), WHERE + "as queries and keys powers of 2 from 16 to 256"),
    "small": (document([64, 8, 8, 2]), WHERE + "as queries and keys powers of 2 from 16"),
    "warps": (document([64, 64, 6, 2]), WHERE + "1, 2, 4, 8, 16 or 32 warps"),
    "stages": (document([64, 64, 8, 0]), WHERE + ".* 1 to 8 stages"),
    # A tile of an additive score is read without a mask, as far as its table has room.
    "beyond-the-room": (document([256, 64, 8, 1], path=ADDITIVE), "powers of 2 from 16 to 128"),
    "sums": (document([8, 64, 8, 1], path=STORED), "powers of 2 from 16 to 128"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_the_error_names_the_malformed_entry(name: str, tmp_path: Path) -> None:
    content, expected = MALFORMED[name]
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FileError, match=expected) as found:
        tiles.read(path)
    assert str(path) in str(found.value)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiles.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(FileError, match=r"none\.json: no such file"):
        tile_of("forward", 90, "inner", "bfloat16", 128)
