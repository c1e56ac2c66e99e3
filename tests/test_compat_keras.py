"""Keras's own tests of its attention layers, unchanged, on `attnscore.compat.keras`.

They come with Keras. Our tests of each behaviour are in ``tests/keras_checks/check_drop_ins.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# The classes are replaced before the test files are imported, under the names by which these take them.
CHILD = """
import pathlib, sys
import keras, pytest
from keras.src import layers
from attnscore.compat import keras as compat

for name in compat.__all__:
    kind = getattr(compat, name)
    setattr(layers, kind.__name__, kind)
folder = pathlib.Path(keras.__file__).parent / "src" / "layers" / "attention"
options = ["-q", "-c", sys.argv[1], "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
sys.exit(pytest.main([*options, *map(str, sorted(folder.glob("*_test.py")))]))
"""
# Passed and skipped; those skipped are about flash attention, which Keras has for its other backends alone.
FOUND = {"tensorflow": (112, 4), "torch": (116, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("backend", FOUND)
def test_the_tests_of_the_originals_pass(backend: str, tmp_path: Path) -> None:
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\nmarkers = requires_trainable_backend: of Keras\n")
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(settings)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed, skipped = (re.search(rf"(\d+) {word}", done.stdout) for word in ("passed", "skipped"))
    assert (int(passed[1]) if passed else 0, int(skipped[1]) if skipped else 0) == FOUND[backend]
