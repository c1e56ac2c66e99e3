"""All models of the installed transformers, tiny and with random weights: `attend` against their own attention.

``python tests/hf_models.py [--part N] [FOLDER ...]`` runs them and prints one line each; ``--table`` writes the table
into ``docs/hugging-face.md``, and the folders whose models work into ``benchmarks/results/hugging-face.txt``.

- The list is made from the installed package: in each folder of ``transformers.models`` one class for each class of
  configurations, one that ends with ``Model`` where there is such, and one more that generates text.
- Configurations become tiny by the names of their attributes. A class without a small configuration, or that its eager
  attention does not run with inputs made from the names of the arguments, is counted, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import inspect
import pkgutil
import re
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

import attnscore as ats
from attnscore.integrations import transformers as integration

LENGTH, DECODED, HEAD_DIM, HEADS, WIDTH, VOCABULARY, IMAGE, PATCH = 9, 5, 16, 4, 64, 99, 32, 8
PARTS = 4
# Of outputs near 1, float32.
LIMIT = 1e-4


# ---------------------------------------------------------------- tiny configurations

# Attributes by name, first match first: whole numbers (with the default at hand) become these.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(max|n)_.*position.*|max_seq.*|n_ctx|.*max_length|max_(source|target)_positions|seq_length", 128),
    (r"type_vocab_size|.*_type_vocab_size|num_labels", None),
    (r"codebook_size", 64),
    (r".*vocab.*size.*|.*num_embeddings|num_codevectors.*", VOCABULARY),
    (r"mamba_(d_head|head_dim)", 2 * WIDTH // HEADS),
    (r"index_topk", 4),
    (r"(num|n)_(mel_bins|mels)|feature_size|input_feat_per_channel|num_mel_bins", 16),
    (r".*experts_per_tok|.*top_?k|moe_k", lambda v: min(v, 2)),
    (r"n_group|topk_group|n_groups|num_expert_group.*", 1),
    (r".*(num|n)_.*experts.*|moe_num_experts|num_experts", lambda v: min(v, 4)),
    (r".*(key_value|kv)_?heads?", lambda v: min(v, 2)),
    (r".*heads?(_count)?|n_heads?|.*_n_heads?", lambda v: min(v, HEADS)),
    (r"rotary_dim|rope_dim", 8),
    (r".*head_dim.*|d_kv|kv_channels|attention_key_dim|.*head_size", HEAD_DIM),
    (r".*lora_rank|.*_rank", 16),
    (r"window_size", lambda v: min(v, 4) if v <= 64 else 4 * PATCH),  # of tokens or of pixels
    (r".*(sliding_window|local_attention|chunk_size|window_size|attention_window).*", lambda v: min(v, 4)),
    (r"image_size|img_size|.*image_size|input_size|pretrain_image_size", IMAGE),
    (r"temporal_patch_size", lambda v: v),
    (r".*patch_size", PATCH),
    (r".*(layer|block|depth)s?|num_.*layers?|n_layers?|.*(num|n)_(layers?|blocks?)", lambda v: min(v, 2)),
    (r".*(intermediate|ffn|mlp|inner|feed_?forward|hidden)_(size|dim)|d_ff|dim_feedforward|n_inner", WIDTH),
    (
        r".*(hidden|embed(ding)?|model|output|input|projection|proj|conv|encoder|decoder)_?(size|dim|width)s?|d_model",
        WIDTH,
    ),
    (r"n_embd|dim|width|.*_dim|.*_width|.*_hidden", WIDTH),
    (r"output_channels|out_channels|.*_out_channels", lambda v: WIDTH if v >= 32 else v),
    (
        r"num_queries|num_query_tokens|num_latents|n_latents|resampler_n_latents|num_.*quer(ies|y).*",
        lambda v: min(v, 6),
    ),
)
# In place of None, which some classes do not take.
NEEDED = {"vocab_size": VOCABULARY, "num_experts_per_tok": 2, "prediction_length": 4, "n_routed_experts": 4}
IDS = re.compile(r".*(_token_id|_token_index|_id|_token)$")


def tiny_settings(config: Any, depth: int = 0) -> dict[str, Any]:
    """Settings of a small configuration of the same class, from one with default settings."""
    settings: dict[str, Any] = {}
    layers = next((getattr(config, n) for n in ("num_hidden_layers", "n_layer", "num_layers") if hasattr(config, n)), 0)
    special = VOCABULARY
    for name, value in sorted(vars(config).items()):
        if name.startswith("_") or name in ("transformers_version", "dtype", "id2label", "label2id"):
            continue
        if isinstance(value, transformers.PreTrainedConfig):
            settings[name] = type(value)(**tiny_settings(value, depth + 1))
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            settings[name] = tiny_rope(value, config)
        elif isinstance(value, bool):
            continue
        elif value is None:
            if name in NEEDED:
                settings[name] = NEEDED[name]
        elif isinstance(value, int) and IDS.match(name):
            if value >= VOCABULARY:
                special -= 1
                settings[name] = special
        elif isinstance(value, int):
            # Latent attention makes keys and values for every head.
            small = (
                HEADS if name == "num_key_value_heads" and hasattr(config, "kv_lora_rank") else tiny_size(name, value)
            )
            if small is not None and small != value:
                settings[name] = small
        elif isinstance(value, (list, tuple)) and value and layers and len(value) == layers and layers > 2:
            settings[name] = shortened(value)
        elif isinstance(value, (list, tuple)) and all(type(x) is int for x in value):
            small = [tiny_size(name, x) for x in value]
            if None not in small and small != list(value):
                settings[name] = type(value)(small)
    return settings


def tiny_size(name: str, value: int) -> int | None:
    """The small number in place of this one, None: it stays."""
    for pattern, small in SIZES:
        if re.fullmatch(pattern, name):
            return small(value) if callable(small) else small
    return None


def shortened(values: Any) -> list[Any]:
    """Two layers: of different kinds, where there are such."""
    other = next((x for x in values if x != values[0]), values[0])
    return [values[0], other] if isinstance(values[0], str) else list(values[:2])


def tiny_rope(rope: dict[str, Any], config: Any) -> dict[str, Any]:
    """Rotary embeddings without factors for each channel; sections of several axes fill half of a small head."""
    if any(isinstance(x, dict) for x in rope.values()):
        return {name: tiny_rope(x, config) if isinstance(x, dict) else x for name, x in rope.items()}
    small = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    for name in ("partial_rotary_factor", "mrope_interleaved"):
        if name in rope and not hasattr(config, "qk_rope_head_dim"):
            small[name] = rope[name]
    half = int(HEAD_DIM * (small.get("partial_rotary_factor") or 1.0)) // 2
    small["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return small


# ---------------------------------------------------------------- inputs by the names of arguments


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(10, 60, shape, generator=torch.Generator().manual_seed(2))


PADDING = torch.ones(2, LENGTH, dtype=torch.long)
PADDING[1, -3:] = 0


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes, of the configuration or of one nested in it."""
    nested = [x for x in vars(config).values() if isinstance(x, transformers.PreTrainedConfig)]
    for name in names:
        for part in (config, *nested):
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def choices(name: str, config: Any) -> list[Any]:
    """Arrays to try for an argument of this name; none: left to its default."""
    size = setting(config, "image_size", "img_size", "input_size", default=IMAGE)
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    if isinstance(height, (list, tuple)):
        height = width = height[0]
    channels = setting(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    wide = setting(config, "hidden_size", "d_model", "embed_dim", default=WIDTH)
    wide = wide if isinstance(wide, int) else WIDTH
    bins = setting(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "num_mels", default=16)
    patch = setting(config, "patch_size", "spatial_patch_size", default=PATCH)
    patch = patch if isinstance(patch, int) else patch[0]
    time_patch = setting(config, "temporal_patch_size", default=1)
    merge = setting(config, "spatial_merge_size", default=2)
    merge = merge if isinstance(merge, int) else 2
    flat = (4 * merge) ** 2
    grid = torch.tensor([[1, 2 * merge, 2 * merge], [1, 2 * merge, 2 * merge], [1, 2 * merge, 4 * merge]])
    picture = numbers(2, channels, height, width)
    match name:
        case "input_ids" | "decoder_input_ids":
            length = LENGTH if name == "input_ids" else DECODED
            return [tokens(2, length), tokens(2, length, setting(config, "num_codebooks", "n_codebooks", default=4))]
        case "attention_mask":
            return [PADDING]
        case "inputs_embeds" | "query_embeds":
            return [numbers(2, LENGTH, wide)]
        case "pixel_values" | "flattened_patches" | "sample" | "image":
            patches = channels * patch * patch
            return [
                picture, numbers(2, 2, channels, height, width), numbers(flat, patches * time_patch),
                numbers(2, 16, patches), numbers(2, 1, channels, height, width), numbers(flat, channels, patch, patch),
                numbers(2, 16, patches + 2),
            ]  # fmt: skip
        case "pixel_values_videos":
            return [numbers(2, 4, channels, height, width)]
        case "input_features" | "features":
            frames = 2 * setting(config, "max_source_positions", default=32)
            return [
                numbers(2, bins, 64),
                numbers(2, bins, frames),
                numbers(2, 64, bins),
                numbers(2, 1, 64, bins),
                numbers(bins, 64),
            ]
        case "input_values":
            return [numbers(2, 4000), numbers(2, 1, 4000), numbers(2, 64, bins), tokens(2, 4, 20)]
        case "grid_thw" | "image_grid_thw":
            return [grid, torch.tensor([[1, 8, 8]]), torch.tensor([[1, 4, 4], [1, 4, 12]])]
        case "hidden_states":
            return [numbers(int(grid.prod(-1).sum()), channels * time_patch * patch * patch), numbers(2, LENGTH, wide)]
        case "past_values":
            steps = setting(config, "context_length", default=16)
            inputs = setting(config, "num_input_channels", default=1)
            return [numbers(2, steps, inputs), numbers(2, steps)]
        case "encoder_hidden_states" | "context_hidden_states" | "latents" | "inputs":
            return [numbers(2, 7, wide)]
        case "bbox":
            return [tokens(2, LENGTH, 4).sort(-1).values]
        case "qformer_input_ids":
            return [tokens(2, LENGTH)]
    return []


# What a forward pass needs, though its signature gives it a default.
USUAL = ("input_ids", "attention_mask", "pixel_values", "input_features", "input_values", "decoder_input_ids", "bbox")


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Arguments to try, the usual first."""
    parameters = inspect.signature(model.forward).parameters
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    main = [model.main_input_name] if isinstance(model.main_input_name, str) else model.main_input_name
    usual = [n for n in parameters if n in USUAL]
    text = [n for n in usual if n in ("input_ids", "attention_mask")]
    sets = [
        usual,
        [*required, *main],
        text,
        [*text, "decoder_input_ids"],
        ["inputs_embeds"],
        ["inputs_embeds", "encoder_hidden_states"],
    ]
    tried = []
    for names in sets:
        unique = tuple(dict.fromkeys(n for n in (*required, *names) if n in parameters))
        if unique and unique not in tried:
            tried.append(unique)
            options = [choices(n, model.config) for n in unique]
            if all(options):
                for values in product(*options):
                    arguments = dict(zip(unique, values, strict=True))
                    sound = arguments.get("input_values", arguments.get("input_features"))
                    if "attention_mask" in arguments and "input_ids" not in arguments and sound is not None:
                        # Of samples or frames: three quarters of the second sound.
                        frames = max(sound.shape[1:])
                        arguments["attention_mask"] = torch.ones(2, frames, dtype=torch.long)
                        arguments["attention_mask"][1, 3 * frames // 4 :] = 0
                    yield arguments


# ---------------------------------------------------------------- the models


@dataclass
class Row:
    """One model and what came of it."""

    folder: str
    name: str
    status: str = ""
    """works, refused, not used, unbuilt, not run, or fault."""
    reason: str = ""
    calls: int = 0
    seconds: float = 0.0
    also: list[str] = field(default_factory=list)


def folders() -> list[str]:
    return sorted(x.name for x in pkgutil.iter_modules(transformers.models.__path__) if x.ispkg)


def classes(folder: str) -> list[type]:
    """The models of one folder."""
    path = f"transformers.models.{folder}"
    package = importlib.import_module(path)
    chosen: dict[tuple[Any, bool], type] = {}
    kinds: list[type] = []
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("modeling_"):
            continue
        try:
            loaded = importlib.import_module(f"{path}.{module.name}")
        except ImportError:
            continue
        kinds += [
            kind
            for kind in vars(loaded).values()
            if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
            and kind.__module__ == loaded.__name__ and kind.config_class is not None
            and kind.forward is not torch.nn.Module.forward
        ]  # fmt: skip
    # Most encoders, decoders and heads share the configuration of a class that ends with Model.
    for kind in sorted(kinds, key=lambda kind: not kind.__name__.endswith("Model")):
        chosen.setdefault((kind.config_class, kind.can_generate()), kind)
    return list(chosen.values())


def build(kind: type) -> Any:
    config = kind.config_class()
    config = kind.config_class(**tiny_settings(config))
    with contextlib.suppress(RuntimeError, NotImplementedError, ValueError), torch.device("meta"):
        count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
        if count > 5_000_000:
            raise MemoryError("more than 5 million parameters")
    torch.manual_seed(1)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def made_with(kind: type, model: Any, name: str) -> Any:
    """The model with this attention from the start, as `from_pretrained` makes it, which checks less."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = name
    made = kind(config).eval()
    made.load_state_dict(model.state_dict())
    return made


def arrays(outputs: Any) -> list[torch.Tensor]:
    """The floating arrays of outputs, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, dict):
        outputs = [x for name, x in outputs.items() if not re.search("past|cache|attentions", name)]
    return [y for x in outputs for y in arrays(x)] if isinstance(outputs, (list, tuple)) else []


def at_tokens(out: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    return out if padding is None or out.shape[:2] != padding.shape else out[padding.bool()]


def run(model: Any, implementation: str, arguments: dict[str, Any], gradients: bool) -> Any:
    """The outputs, and with `gradients` the gradients of all parameters."""
    if implementation != model.config._attn_implementation:
        model.set_attn_implementation(implementation)
    model.zero_grad()
    torch.manual_seed(3)
    with contextlib.nullcontext() if gradients else torch.no_grad():
        out = [at_tokens(x, arguments.get("attention_mask")) for x in arrays(model(**arguments))]
    if not gradients:
        return out
    differentiable = [x for x in out if x.requires_grad]
    if differentiable:
        sum((x * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).sum() for x in differentiable).backward()
    return [x.detach() for x in out], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Largest difference, relative to the scale of each array."""
    if [x.shape for x in a] != [x.shape for x in b]:
        return float("inf")
    largest = 0.0
    for x, y in zip(a, b, strict=True):
        if x.numel():
            both = ~(x.isnan() & y.isnan()) & (x != y)
            if both.any():
                scale = y[y.isfinite()].abs().max() if y.isfinite().any() else y.new_ones(())
                far = (x - y)[both].abs().max() / scale.clamp(min=1.0)
                largest = max(largest, float("inf") if far.isnan() else float(far))
    return largest


def follows_sdpa(model: Any, arguments: dict[str, Any], ours: list[torch.Tensor]) -> bool:
    """Whether the outputs equal transformers' sdpa attention, where the model has that."""
    try:
        return distance(ours, run(model, "sdpa", arguments, False)) <= LIMIT
    except ValueError:
        return False


class Counted:
    """Counts the calls of the integration."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> Counted:
        self._function = integration.attention_forward

        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            return self._function(*args, **options)

        integration.attention_forward = counted
        integration.register()
        return self

    def __exit__(self, *_: object) -> None:
        integration.attention_forward = self._function
        integration.register()


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def check(kind: type, name: str, row: Row) -> None:
    """Fill the row."""
    try:
        model = build(kind)
    except Exception as error:
        row.status, row.reason = "unbuilt", brief(error)
        return
    arguments, eager, failed = None, None, []
    for attempt in inputs(model):
        try:
            eager = run(model, "eager", attempt, False)
        except Exception as error:
            failed.append(f"{'+'.join(attempt)}: {brief(error)}")
            continue
        if eager:
            arguments = attempt
            break
    if arguments is None:
        row.status, row.reason = "not run", (failed[0] if failed else f"no inputs for {model.main_input_name}")
        row.also = failed
        return
    with Counted() as counted:
        try:
            made = made_with(kind, model, name)
        except (KeyError, TypeError):
            # A table of classes by the names of implementations: the vision layers of SAM. It can be set later.
            made = model
        ours = run(made, name, arguments, False)
        row.calls = counted.calls
        if not counted.calls:
            row.status, row.reason = "not used", "no call of the attention interface"
            if (far := distance(ours, eager)) > LIMIT:
                row.status, row.reason = "fault", f"no call of the attention interface, and outputs differ by {far:.1e}"
            return
        notes = []
        reference = "eager"
        if (far := distance(ours, eager)) > LIMIT and follows_sdpa(model, arguments, ours):
            # Its eager attention reads the padding otherwise: LASR's.
            reference = "sdpa"
        elif far > LIMIT:
            notes.append(f"outputs differ by {far:.1e}")
        if "attention_mask" in arguments:
            whole = {n: x for n, x in arguments.items() if n != "attention_mask"}
            try:
                expected = run(model, reference, whole, False)
            except Exception:
                pass
            else:
                if (far := distance(run(model, name, whole, False), expected)) > LIMIT:
                    notes.append(f"outputs without padding differ by {far:.1e}")
        try:
            _, expected = run(model, reference, arguments, True)
        except Exception:
            expected = None
        if expected is not None:
            _, ours = run(model, name, arguments, True)
            if expected.keys() != ours.keys():
                notes.append(f"gradients of {sorted(expected.keys() ^ ours.keys())[:3]}")
            # Of the keys' biases nothing but rounding is left.
            rounding = 1e-6 * max(float(x.abs().max()) for x in expected.values() if x.numel())
            for n in expected.keys() & ours.keys():
                if (far := distance([ours[n]], [expected[n]])) > 10 * LIMIT + rounding:
                    notes.append(f"gradient of {n} differs by {far:.1e}")
                    break
        if model.can_generate() and "input_ids" in arguments:
            left = {n: x.flip(1) if n == "attention_mask" else x for n, x in arguments.items()}
            options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "disable_compile": True}
            try:
                model.set_attn_implementation(reference)
                expected = model.generate(**left, **options)
            except Exception:
                pass
            else:
                model.set_attn_implementation(name)
                if not torch.equal(model.generate(**left, **options), expected):
                    notes.append("greedy tokens differ")
                else:
                    row.also.append("generates")
    row.status, row.reason = ("fault", "; ".join(notes)) if notes else ("works", "")


class Slow(Exception):
    pass


def examine(kind: type, folder: str, name: str, seconds: int = 60) -> Row:
    row, start = Row(folder, kind.__name__), time.perf_counter()

    def late(*_: object) -> None:
        raise Slow(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        check(kind, name, row)
    except ats.AttnscoreError as error:
        row.status, row.reason = "refused", brief(error)
    except Exception as error:
        row.status, row.reason = "fault", brief(error)
    finally:
        signal.alarm(0)
    row.seconds = time.perf_counter() - start
    return row


def rows(part: int | None = None, chosen: list[str] | None = None, parts: int = PARTS) -> Iterator[Row]:
    name = integration.register()
    torch.set_num_threads(1)
    for i, folder in enumerate(chosen or folders()):
        if part is not None and i % parts != part:
            continue
        try:
            kinds = classes(folder)
        except Exception as error:
            yield Row(folder, "", "unbuilt", brief(error))
            continue
        for kind in kinds:
            yield examine(kind, folder, name)
        gc.collect()


# ---------------------------------------------------------------- the table


ROOT = Path(__file__).resolve().parents[1]
PAGE, WORKING = ROOT / "docs" / "hugging-face.md", ROOT / "benchmarks" / "results" / "hugging-face.txt"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
# What a folder is counted as: the first of these that one of its classes is.
ORDER = ("fault", "refused", "works", "not used", "not run", "unbuilt")


def folders_by_status(examined: list[Row]) -> dict[str, list[str]]:
    """Return the folders of each kind of `ORDER`."""
    status: dict[str, str] = {}
    for row in examined:
        status[row.folder] = min(status.get(row.folder, "unbuilt"), row.status, key=ORDER.index)
    return {kind: sorted(f for f, s in status.items() if s == kind) for kind in ORDER}


def table(examined: list[Row]) -> str:
    """The part of the page between its two comments."""
    names = folders_by_status(examined)
    classes = {kind: sum(row.status == kind for row in examined) for kind in ORDER}
    lines = [
        f"transformers {transformers.__version__}, PyTorch {torch.__version__.split('+')[0]}:"
        f" {len(examined)} classes of {sum(map(len, names.values()))} folders.",
        "",
        "| | classes | folders |",
        "|---|---|---|",
        f"| work | {classes['works']} | {len(names['works'])}, listed in `{WORKING.relative_to(ROOT)}` |",
        f"| raise an error; grouped by the argument that the error names | {classes['refused']} |"
        f" {'; '.join(refusals(examined))} |",
        "| have no attention, or keep their own: the class that ran does not use transformers' interface"
        f" | {classes['not used']} | {', '.join(names['not used'])} |",
        "| not checked: eager attention does not run with the inputs that the script makes from the names of arguments"
        f" | {classes['not run']} |"
        f" {len(names['not run'])} others |",
        f"| not checked: the script cannot make a small model from the names of the settings | {classes['unbuilt']} |"
        f" {len(names['unbuilt'])} others |",
    ]
    if classes["fault"]:
        lines.append(f"| differ or fail | {classes['fault']} | {', '.join(names['fault'])} |")
    return "\n".join(lines)


def refusals(examined: list[Row]) -> list[str]:
    """The arguments that are refused, each with its folders."""
    folders_of: dict[str, set[str]] = {}
    for row in examined:
        if row.status == "refused":
            folders_of.setdefault(row.reason.split(": ")[1], set()).add(row.folder)
    return [f"`{argument}`: {', '.join(sorted(names))}" for argument, names in folders_of.items()]


def write_table(examined: list[Row]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(examined)}\n{END}{after}")
    WORKING.write_text("\n".join(folders_by_status(examined)["works"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--part", type=int, help=f"0 to {PARTS - 1}: every so many of the folders")
    parser.add_argument("--table", action="store_true", help="write the table of all models")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    examined = []
    for row in rows(options.part, options.folders):
        examined.append(row)
        print(f"{row.status}\t{row.folder}\t{row.name}\t{row.calls}\t{row.seconds:.1f}\t{row.reason}", flush=True)
    if options.table:
        write_table(examined)


if __name__ == "__main__":
    main()
