"""`inspect_model`: every number equals the one made from the model's own eager weights; the report holds the same."""

from __future__ import annotations

import base64
import gc
import json
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import attnscore as ats
from attnscore.cli import main
from attnscore.diagnostics import Inspection, inspect_model
from attnscore.diagnostics.inspection.head_metrics import SETTINGS, STATISTICS
from attnscore.errors import ArgumentError
from transformers_cases import ARCHITECTURES, since
from transformers_cases import make as made

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it"
MINILM_TEXT = "Astronauts on the night shift watched the planet rise over the lunar horizon."
TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SEES = TOWER | {"image_size": 8, "patch_size": 4}


class Words:
    """A tokenizer of few words, as transformers calls one."""

    def __call__(self, text: str, *, truncation: bool = False, max_length: int = 0, return_tensors: str = "") -> Any:
        ids = [3 + len(word) for word in text.split()]
        ids = ids[:max_length] if truncation else ids
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"<{one}>" for one in ids]


# Models that read text; of a pair the encoder is inspected.
READERS = tuple(row.name for row in ARCHITECTURES if row.kind in ("decoder", "encoder", "pair"))


def eager_weights(model: Any, text: str) -> list[np.ndarray]:
    model.set_attn_implementation("eager")
    part = model.get_encoder() if model.config.is_encoder_decoder else model
    with torch.no_grad():
        found = part(**Words()(text, return_tensors="pt"), output_attentions=True).attentions
    return [np.asarray(x[0].double()) for x in found]


# T5 returns its own weights, with which they are compared, since this release.
@pytest.fixture(scope="module", params=[pytest.param(x, marks=since("5.20") if x == "t5" else ()) for x in READERS])
def inspected(request: pytest.FixtureRequest) -> tuple[Any, Inspection, list[np.ndarray]]:
    model = made(request.param)
    own = eager_weights(model, TEXT)
    return model, inspect_model(model, TEXT, tokenizer=Words()), own


def test_weights_are_those_of_the_model(inspected: tuple[Any, Inspection, list[np.ndarray]]) -> None:
    _, found, own = inspected
    assert len(found.layers) == len(own)
    for layer, weights in enumerate(own):
        for head in range(found.layers[layer].heads):
            np.testing.assert_allclose(found.weights(layer, head), weights[head], atol=2e-6)
    last = len(own) - 1
    block = found.weights(last, 2, query_index=[3, 7], key_index=slice(1, 4))
    np.testing.assert_allclose(block, own[last][2][[3, 7], 1:4], atol=2e-6)


def test_statistics_are_those_of_the_matrix(inspected: tuple[Any, Inspection, list[np.ndarray]]) -> None:
    _, found, _ = inspected
    assert set(found.statistics) == set(STATISTICS)
    for place, layer in enumerate(found.layers):
        inputs = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                  for name, x in layer.inputs.items()}  # fmt: skip
        query, key = inputs.pop("query"), inputs.pop("key")
        scores = np.asarray(ats.attention_scores(query, key, **inputs)[0])
        weights = np.asarray(ats.attention_weights(query, key, **inputs)[0])
        rest = np.maximum(0, 1 - weights.sum(-1)) if layer.inputs["sink"] is not None else np.zeros(weights.shape[:-1])
        every = np.concatenate([weights, rest[..., None]], -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(every > 1e-300, every * np.log(every), 0).sum(-1)
        seen = np.isfinite(scores)
        mean = np.where(seen, scores, 0).sum(-1) / seen.sum(-1)
        variance = np.where(seen, (scores - mean[..., None]) ** 2, 0).sum(-1) / seen.sum(-1)
        expected = {
            "entropy": entropy.mean(-1),
            "effective_keys": np.exp(entropy).mean(-1),
            "largest_weight": weights.max(-1).mean(-1),
            "logit_variance": variance.mean(-1),
            "largest_logit": scores.max((-1, -2)),
            "jacobian_trace": (weights.sum(-1) - (weights**2).sum(-1)).mean(-1),
            "first_key": weights[..., 0].mean(-1),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(found.statistics[name][place], values, rtol=1e-4, atol=2e-6, err_msg=name)


def test_other_scales(inspected: tuple[Any, Inspection, list[np.ndarray]]) -> None:
    _, found, _ = inspected
    for setting in SETTINGS:
        weights = found.weights(0, 1, setting=setting)
        assert found.settings[setting]["largest_weight"][0, 1] == pytest.approx(weights.max(-1).mean(), rel=1e-4)
    for name in ("entropy", "largest_weight"):
        np.testing.assert_allclose(found.settings["model"][name], found.statistics[name], rtol=1e-5)
    if all(layer.inputs["sink"] is None and layer.inputs["bias"] is None for layer in found.layers):
        assert (found.settings["cold"]["entropy"] <= found.settings["warm"]["entropy"]).all()


def test_links_and_mass(inspected: tuple[Any, Inspection, list[np.ndarray]]) -> None:
    _, found, own = inspected
    last = len(own) - 1
    for head in range(found.layers[last].heads):
        links = found.top_links(last, head, 5)
        expected = np.sort(own[last][head], axis=None)[::-1][:5]
        np.testing.assert_allclose([weight for _, _, weight in links], expected, atol=2e-6)
        assert all(abs(own[last][head][i, j] - weight) < 2e-6 for i, j, weight in links)
        np.testing.assert_allclose(found.key_mass(last, head), own[last][head].sum(0), atol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model = made("llama").train()
    model.set_attn_implementation("sdpa")
    frozen = next(model.children()).eval()
    inspect_model(model, TEXT, tokenizer=Words())
    assert model.training and not frozen.training and model.config._attn_implementation == "sdpa"


def test_the_model_is_not_kept() -> None:
    """transformers keeps what is registered by its name."""
    model = made("llama")
    kept = weakref.ref(model)
    inspect_model(model, TEXT, tokenizer=Words())
    del model
    gc.collect()
    assert kept() is None


def test_rows_and_what_is_left_out() -> None:
    found = inspect_model(made("gpt2"), TEXT, tokenizer=Words(), max_tokens=5)
    assert len(found.tokens) == 5 and found.left_out == len(TEXT.split()) - 5
    rows = found.to_rows()
    assert len(rows) == 2 * 4
    assert len({frozenset(row) for row in rows}) == 1
    assert rows[-1]["name"].endswith("attn") and rows[-1]["head"] == 3
    assert rows[0]["entropy"] == found.statistics["entropy"][0, 0]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


def numbers_of(part: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(part["numbers"]), "<i2") * part["unit"]


def test_the_report_holds_what_makes_the_weights(
    inspected: tuple[Any, Inspection, list[np.ndarray]], tmp_path: Path
) -> None:
    """The page's own arithmetic, in NumPy, gives the weights; the browser's is in test_inspect_browser.py."""
    _, found, own = inspected
    data = data_of(found.to_html(tmp_path / "report.html").read_text("utf-8"))
    length, layer = len(found.tokens), data["layers"][-1]
    assert data["tokens"] == list(found.tokens)
    if "weights" in layer:
        codes = np.frombuffer(base64.b64decode(layer["weights"]["2"]), "<u2").reshape(length, length)
        weights = np.where(codes == 65535, 0, np.exp(codes / 65535 * -16))
    else:
        query, key = numbers_of(layer["query"]["2"]), numbers_of(layer["key"][str(2 // layer["group"])])
        scores = layer["scale"] * (query.reshape(length, -1) @ key.reshape(length, -1).T)
        scores = scores if layer["cap"] is None else layer["cap"] * np.tanh(scores / layer["cap"])
        if layer["visible"] is not None:
            starts, stops = (np.array(x)[:, None] for x in layer["visible"])
            scores = np.where((np.arange(length) >= starts) & (np.arange(length) < stops), scores, -np.inf)
        total = np.exp(scores).sum(-1, keepdims=True) + (0 if layer["sink"] is None else np.exp(layer["sink"][2]))
        weights = np.exp(scores) / total
    np.testing.assert_allclose(weights, own[-1][2], atol=3e-4)


def test_a_small_file_keeps_the_sharpest_heads(tmp_path: Path) -> None:
    found = inspect_model(made("llama"), TEXT, tokenizer=Words())
    length, dim = len(found.tokens), 8
    one_head = 2 * length * 2 * dim / 10**6
    data = data_of(found.to_html(tmp_path / "report.html", megabytes=3.5 * one_head).read_text("utf-8"))
    drawn = {(place, int(head)) for place, layer in enumerate(data["layers"]) for head in layer["query"]}
    entropy = found.statistics["entropy"]
    sharpest = np.argsort(entropy, axis=None, kind="stable")[:3]
    assert drawn == {(int(i), int(j)) for i, j in zip(*np.unravel_index(sharpest, entropy.shape), strict=True)}


def test_text_is_no_markup(tmp_path: Path) -> None:
    class Hostile(Words):
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["</script><!--<script>alert(1)" for _ in ids]

    page = inspect_model(made("gpt2"), TEXT, tokenizer=Hostile()).to_html(tmp_path / "a.html").read_text("utf-8")
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert "<" not in data and set(json.loads(data)["tokens"]) == {"</script><!--<script>alert(1)"}
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda _: inspect_model("nowhere", "a"), "model: expected 'minilm', or the folder of a Hugging Face model"),
        (
            lambda _: inspect_model(made("gpt2"), "a"),
            "tokenizer: expected the model's tokenizer, given a model, got None",
        ),
        (lambda _: inspect_model(made("gpt2"), " ", tokenizer=Words()), "text: expected some text, got none"),
        (lambda found: found.weights(2, 0), "layer: expected 0 to 1, got 2"),
        (lambda found: found.top_links(0, 4), "head: expected 0 to 3, got 4"),
        (lambda found: found.key_mass(-1, 0), "layer: expected 0 to 1, got -1"),
        (lambda found: found.weights(0, 0, setting="hot"), "setting: expected one of model, unscaled, cold, warm, got"),
    ],
)
def test_wrong_input(call: Callable[[Inspection], Any], words: str) -> None:
    found = inspect_model(made("gpt2"), TEXT, tokenizer=Words())
    with pytest.raises(ArgumentError, match=re.escape(words)):
        call(found)


class Framed(Words):
    """A tokenizer that puts two tokens of its own around the text, and knows a limit."""

    model_max_length = 7

    def num_special_tokens_to_add(self) -> int:
        return 2


def test_limits_of_tokenizer_and_positions() -> None:
    assert len(inspect_model(made("gpt2"), TEXT, tokenizer=Framed()).tokens) == 7
    with pytest.raises(
        ArgumentError, match="max_tokens: expected more than the 2 tokens that the tokenizer adds, got 2"
    ):
        inspect_model(made("gpt2"), TEXT, tokenizer=Framed(), max_tokens=2)
    # RoBERTa's first position is the one behind the padding's: 12 places are for 10 tokens.
    config = transformers.RobertaConfig(**TOWER, vocab_size=50, max_position_embeddings=12, pad_token_id=1)
    found = inspect_model(transformers.RobertaModel(config), TEXT, tokenizer=Words())
    assert len(found.tokens) == 10 and found.left_out == len(TEXT.split()) - 10
    assert found.facts == f"1 layer, 2 heads, 10 tokens; of the text, {found.left_out} further tokens were left out."


def test_a_model_of_sixteen_bits(tmp_path: Path) -> None:
    """Weights are not rounded to 8 bits, and the report is written."""
    model = made("llama").to(torch.bfloat16)
    found = inspect_model(model, TEXT, tokenizer=Words())
    np.testing.assert_allclose(found.weights(1, 2).sum(-1), 1, atol=1e-6)
    (_, _, weight), *_ = found.top_links(1, 2)
    assert weight == pytest.approx(found.weights(1, 2).max(), abs=1e-6)
    np.testing.assert_allclose(found.key_mass(1, 2), found.weights(1, 2).sum(0), atol=1e-5)
    assert data_of(found.to_html(tmp_path / "report.html").read_text("utf-8"))["links"]


def test_a_model_with_nan(tmp_path: Path) -> None:
    """Its numbers are NaN in the table of the report, and the other layers are drawn."""
    model = made("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    found = inspect_model(model, TEXT, tokenizer=Words())
    assert np.isnan(found.statistics["entropy"][1, 0]) and np.isfinite(found.statistics["entropy"][0]).all()
    assert found.top_links(1, 0) == []
    data = data_of(found.to_html(tmp_path / "report.html").read_text("utf-8"))
    assert data["statistics"]["entropy"]["values"][1][0] is None and data["links"][1][0] == []
    assert "0" in data["layers"][0]["query"] and "0" not in data["layers"][1]["query"]


def test_links_name_no_key_that_gets_nothing() -> None:
    found = inspect_model(made("llama"), "two words", tokenizer=Words())
    links = found.top_links(0, 0, 10)
    assert sorted((i, j) for i, j, _ in links) == [(0, 0), (1, 0), (1, 1)]


def test_layers_of_different_heads(tmp_path: Path) -> None:
    model = made("gpt2")
    first = model.transformer.h[0].attn
    first.num_heads, first.head_dim = 2, 16  # the same matrices, cut into two heads in place of four
    first.scaling = first.head_dim**-0.5
    found = inspect_model(model, TEXT, tokenizer=Words())
    assert [layer.heads for layer in found.layers] == [2, 4] and len(found.to_rows()) == 6
    assert np.isnan(found.statistics["entropy"][0, 2:]).all() and np.isfinite(found.statistics["entropy"][1]).all()
    values = data_of(found.to_html(tmp_path / "report.html").read_text("utf-8"))["statistics"]["entropy"]["values"]
    assert [len(row) for row in values] == [2, 4]


def test_of_two_halves_it_says_which() -> None:
    assert inspect_model(made("t5"), TEXT, tokenizer=Words()).facts.endswith("; the encoder alone, not the decoder.")


def saved(folder: Path) -> Path:
    """A small model with its tokenizer in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made("gpt2").save_pretrained(folder)
    words = {word: place for place, word in enumerate(["[UNK]", *sorted(set(TEXT.split()))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_a_folder_asks_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "small")
    asked: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        asked.append(arguments)
        raise OSError("no network")

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # Read when huggingface_hub was imported, perhaps by another test.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    before = transformers.utils.logging.get_verbosity(), dict(os.environ)
    found = inspect_model(folder, TEXT)
    assert found.model == "small" and found.tokens == tuple(TEXT.split())
    assert asked == [] and (transformers.utils.logging.get_verbosity(), dict(os.environ)) == before


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("config", "model: expected a folder with a Hugging Face model and tokenizer, got"),
        ("cut", "model: expected a folder with a Hugging Face model and tokenizer, got"),
        ("tokenizer", "tokenizer: expected tokens of the text, got none"),
        ("weights", "model: expected a folder with all weights of GPT2Model, got 4 missing, such as h.1.attn.c_"),
    ],
)
def test_a_folder_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str, words: str) -> None:
    folder, text, out = saved(tmp_path / "small"), tmp_path / "text.txt", tmp_path / "report.html"
    text.write_text(TEXT, "utf-8")
    if harm == "config":
        (folder / "config.json").write_text("{")
    elif harm == "cut":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    elif harm == "tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    else:
        model = made("gpt2")
        model.save_pretrained(folder, state_dict={k: v for k, v in model.state_dict().items() if "h.1.attn" not in k})
    capsys.readouterr()  # what saving said
    assert main(["inspect", str(folder), "--text", str(text), "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not out.exists()


class Touch:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["a pickle", "a pickle of numbers", "a file of Python"])
def test_nothing_of_a_folder_is_run(tmp_path: Path, how: str) -> None:
    folder, ran = saved(tmp_path / "small"), tmp_path / "ran"
    if how == "a file of Python":
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    else:
        (folder / "model.safetensors").unlink()
        weights: Any = made("gpt2").state_dict() if "numbers" in how else Touch(ran)
        torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match="expected a folder with a Hugging Face model and tokenizer, got"):
        inspect_model(folder, TEXT)
    assert not ran.exists()


def test_a_model_of_pictures_is_refused() -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**SEES))
    with pytest.raises(ArgumentError, match="expected a model that reads text, got ViTModel, which reads pixel_values"):
        inspect_model(model, TEXT, tokenizer=Words())


def test_a_model_that_needs_a_picture_beside_the_text_is_refused() -> None:
    config = transformers.CLIPConfig(text_config=TOWER | {"vocab_size": 50}, vision_config=SEES, projection_dim=8)
    with pytest.raises(ArgumentError, match=r"model: expected one that runs on text alone, got CLIPModel: \S") as error:
        inspect_model(transformers.CLIPModel(config), TEXT, tokenizer=Words())
    assert isinstance(error.value.__cause__, (AttributeError, TypeError, ValueError))


def test_every_part_of_a_model_keeps_its_attention() -> None:
    text, picture = transformers.LlamaConfig(**TOWER, vocab_size=50), transformers.CLIPVisionConfig(**SEES)
    config = transformers.LlavaConfig(text_config=text, vision_config=picture, image_token_index=49)
    model = transformers.LlavaModel(config)
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    found = inspect_model(model, TEXT, tokenizer=Words())
    assert [layer.name for layer in found.layers] == ["language_model.layers.0.self_attn"]
    parts = model, model.language_model, model.vision_tower
    assert [part.config._attn_implementation for part in parts] == ["sdpa", "sdpa", "eager"]
    assert model.config.vision_config._attn_implementation == "eager"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "report.html"
    text.write_text(MINILM_TEXT, "utf-8")
    assert main(["inspect", "minilm", "--text", str(text), "--out", str(out)]) == 0
    assert "6 layers, 72 heads, 16 tokens. Report (" in " ".join(capsys.readouterr().out.split())
    data = data_of(out.read_text("utf-8"))
    assert len(data["layers"]) == 6 and data["tokens"][1] == "astronauts"
    assert data["statistics"]["entropy"]["values"][0][2] < 0.2
    assert out.stat().st_size < 6e6


@pytest.mark.parametrize("broken", ["missing", "empty", "latin"])
def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str) -> None:
    text = tmp_path / "text.txt"
    if broken != "missing":
        text.write_bytes(b"" if broken == "empty" else b"caf\xe9")
    assert main(["inspect", "minilm", "--text", str(text), "--out", str(tmp_path / "report.html")]) == 2
    assert str(text) in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
