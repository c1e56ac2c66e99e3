"""Models of the installed transformers, tiny: `attend` against their own attention.

`hf_models.py` makes the list and the inputs. By default a few classes, each with a call that once failed; in the slow
tests one part of four of all folders, by the number of commits or ATTNSCORE_HF_PART.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import hf_models
from attnscore.integrations.transformers import register
from transformers_cases import since

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # transformers' own warnings, and warnings of models that were made for other sizes.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),  # the mask by keyword
        ("parakeet", "ParakeetEncoder"),  # all arguments by keyword
        ("align", "AlignTextModel"),  # a layer that does not say whether it is causal
        ("deepseek_v32", "DeepseekV32Model"),  # selected keys
        ("deepseek_v4", "DeepseekV4Model"),  # additive masks alone
        ("bigbird_pegasus", "BigBirdPegasusModel"),  # the same, in an encoder with its own attention
    ],
)
def test_models_with_what_has_gone_wrong(folder: str, name: str) -> None:
    kind = next(x for x in hf_models.classes(folder) if x.__name__ == name)
    row = hf_models.examine(kind, folder, register())
    assert (row.status, row.reason) == ("works", "") and row.calls


@since("5.23")
def test_an_unsupported_model_says_what_to_do() -> None:
    kind = next(x for x in hf_models.classes("inkling2") if x.__name__ == "Inkling2TextModel")
    row = hf_models.examine(kind, "inkling2", register())
    assert row.status == "refused" and 'set_attn_implementation("eager")' in row.reason


def part() -> int:
    """Which of the four parts: four landings run all."""
    if chosen := os.environ.get("ATTNSCORE_HF_PART"):
        return int(chosen)
    command = ["git", "rev-list", "--count", "HEAD"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(run.stdout or 0) % hf_models.PARTS


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_a_part_of_all_models(half: int) -> None:
    rows = list(hf_models.rows(part() + half * hf_models.PARTS, parts=2 * hf_models.PARTS))
    assert sum(row.status == "works" for row in rows) > 50
    assert [row for row in rows if row.status == "fault"] == []
