"""The table of `make wheels`, and how it packs a wheel. Nothing is compiled here."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from packaging.tags import cpython_tags, parse_tag
from packaging.utils import parse_wheel_filename

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import wheels

PYTHONS = [((3, 11), "cp311"), ((3, 12), "cp312"), ((3, 13), "cp313"), ((3, 14), "cp314"), ((3, 14), "cp314t")]


@pytest.mark.parametrize(("version", "abi"), PYTHONS, ids=[abi for _, abi in PYTHONS])
def test_every_python_takes_one_wheel_of_a_platform(version: tuple[int, int], abi: str) -> None:
    platform = wheels.PLATFORMS[0].tag
    taken = set(cpython_tags(version, [abi], [platform]))
    fitting = [each.tag for each in wheels.ABIS if parse_tag(f"{each.tag}-{platform}") & taken]
    assert len(fitting) == 1


def test_the_first_release_of_the_stable_abi_is_the_one_that_is_compiled_for() -> None:
    (stable,) = [abi for abi in wheels.ABIS if abi.tag.endswith("abi3")]
    major, minor = int(stable.tag[2]), int(stable.tag[3:].partition("-")[0])
    assert stable.flags == (f"-DPy_LIMITED_API=0x{major:02X}{minor:02X}0000",)


@pytest.mark.parametrize("platform", wheels.PLATFORMS, ids=[platform.tag for platform in wheels.PLATFORMS])
def test_a_tag_promises_what_is_compiled(platform: wheels.Platform) -> None:
    cpu, _, system = platform.zig.partition("-")
    assert platform.tag.endswith({"aarch64": ("aarch64", "arm64"), "x86_64": ("x86_64", "amd64")}[cpu])
    release = platform.tag.split("_")[1:3]
    expected = {
        "manylinux": ("Linux", f"linux-gnu.{'.'.join(release)}"),
        "musllinux": ("Linux", "linux-musl"),
        "macosx": ("Darwin", f"macos.{'.'.join(release)}"),
        "win": ("Windows", "windows-gnu"),
    }
    assert (platform.system, system) == expected[platform.tag.split("_")[0]]


def test_kernels_are_shared_by_systems_of_one_kind_and_cpu() -> None:
    by_tag = {platform.tag: platform for platform in wheels.PLATFORMS}
    assert len(by_tag) == len(wheels.PLATFORMS)
    order = list(by_tag)
    for platform in wheels.PLATFORMS:
        if platform.kernels:
            origin = by_tag[platform.kernels]
            assert not origin.kernels
            assert order.index(origin.tag) < order.index(platform.tag)
            assert origin.zig.split("-")[:2] == platform.zig.split("-")[:2]


def test_a_packed_wheel_has_the_module_the_tag_and_a_record(tmp_path: Path) -> None:
    pure = tmp_path / "attnscore-0.1.0-py3-none-any.whl"
    information = "attnscore-0.1.0.dist-info"
    with zipfile.ZipFile(pure, "w") as file:
        file.writestr("attnscore/__init__.py", "")
        file.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: attnscore\nVersion: 0.1.0\n")
        file.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n")
        file.writestr(f"{information}/RECORD", "")
    module = tmp_path / "_native.abi3.so"
    module.write_bytes(b"compiled")
    packed = wheels.pack_wheel(pure, module, "cp312-abi3-win_amd64", tmp_path)
    assert parse_wheel_filename(packed.name)[3] == parse_tag("cp312-abi3-win_amd64")
    with zipfile.ZipFile(packed) as file:
        assert file.read("attnscore/_native.abi3.so") == b"compiled"
        lines = file.read(f"{information}/WHEEL").decode().splitlines()
        assert "Root-Is-Purelib: false" in lines
        assert [line for line in lines if line.startswith("Tag:")] == ["Tag: cp312-abi3-win_amd64"]
        assert "attnscore/_native.abi3.so,sha256=" in file.read(f"{information}/RECORD").decode()
