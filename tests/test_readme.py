"""README, documentation and examples do what they show.

- Python blocks of a file run in their order in one fresh namespace; a text block behind one is what it printed.
- Shell lines name commands, options, extras and make targets that exist.
- Links and pictures lead somewhere. Examples run as they are, without a warning.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from attnscore import kernels, scores
from cases import AUTOMATIC
from printed_output import WordsAndNumbers
from test_mxnet import PYTHON as MXNET
from test_mxnet import VARIABLES as MXNET_VARIABLES

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")})
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
PERFORMANCE = ROOT / "docs" / "performance.md"
# What TensorFlow writes about the machine (no GPU, no fast instructions for a dtype) unless silenced.
TENSORFLOW_LOG = re.compile(r"WARNING: All log messages before absl|[IWE]\d{4} .*\.cc:\d+\] ")

# It needs NumPy below 1.24, which is built for no later Python.
CAN_HAVE_MXNET = sys.version_info < (3, 12)

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block and the line on which its text begins."""

    language: str
    text: str
    line: int
    follows: bool
    """Whether nothing but empty lines lies between it and the block before."""
    elsewhere: str = ""
    """Where it runs by itself: in MXNet's environment (```python mxnet), in Triton's interpreter (```python triton)."""


def blocks(path: Path) -> list[Block]:
    text, found, end = path.read_text(encoding="utf-8"), [], -1
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        follows = end >= 0 and not text[end : match.start()].strip()
        found.append(Block(match["language"], match["text"], line, follows, match["rest"].strip()))
        end = match.end()
    return found


def with_language(*languages: str) -> list[Path]:
    return [path for path in DOCUMENTS if any(block.language in languages for block in blocks(path))]


# ------------------------------------------------------------------ Python


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> Iterator[ModuleType]:
    """An empty module to run in, and a library and a folder that forget what was done to them."""
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)
    monkeypatch.setattr(scores, "_TABLE", dict(scores._TABLE))
    monkeypatch.setattr(kernels, "_TABLE", dict(kernels._TABLE))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield module


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=label(path), marks=[] if path.name == "README.md" else [pytest.mark.slow])
        for path in with_language("python")
    ],
)
# What the ONNX exporter of torch says of itself.
@pytest.mark.filterwarnings("ignore:.*(LeafSpec|axis name)")
def test_python_blocks_run_and_print_what_is_shown(path: Path, fresh: ModuleType) -> None:
    printed: str | None = None
    for block in blocks(path):
        if block.language == "python":
            printed = None if block.elsewhere else run(block, path, fresh)
        elif block.language == "text" and "kernel          native" in block.text and AUTOMATIC != "native":
            printed = None  # the table of `explain` where the native kernels are built
        elif block.language == "text" and block.follows and printed is not None:
            check_printed(block, path, printed)
            printed = None


def check_printed(block: Block, path: Path, printed: str) -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert WordsAndNumbers().check_output(block.text, printed, flags), (
        f"{label(path)}:{block.line} shows\n{block.text}\nbut this was printed:\n{printed}"
    )


def elsewhere(name: str) -> Iterator[Any]:
    """Each block that runs in one of `Block.elsewhere`, with the one behind it where that shows what it printed."""
    for path in with_language("python"):
        found = blocks(path)
        for block, behind in zip(found, [*found[1:], None], strict=True):
            if block.language == "python" and block.elsewhere == name:
                shown = behind if behind is not None and behind.language == "text" and behind.follows else None
                yield pytest.param(path, block, shown, id=f"{label(path)}:{block.line}")


def run_process(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done


ELSEWHERE = list(elsewhere("mxnet"))

# Each block has names of its own; MXNet is imported once.
RUN_ELSEWHERE = """
import contextlib, io, json, sys, traceback

answers = []
for text in json.load(sys.stdin):
    out, failed = io.StringIO(), ""
    with contextlib.redirect_stdout(out):
        try:
            exec(text, {"__name__": "__main__"})
        except BaseException:
            failed = traceback.format_exc()
    answers.append((out.getvalue(), failed))
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def ran_elsewhere() -> dict[tuple[Path, int], tuple[str, str]]:
    """What each block prints in MXNet's environment, and its traceback where it fails, by its file and line."""
    if not MXNET.exists():
        pytest.fail(f"no MXNet: {MXNET} is missing; `make test` sets it up", pytrace=False)
    found = [row.values[:2] for row in ELSEWHERE]
    texts = json.dumps([block.text for _, block in found])
    done = run_process(MXNET, "-c", RUN_ELSEWHERE, input=texts, env=MXNET_VARIABLES)
    return {(path, block.line): tuple(x) for (path, block), x in zip(found, json.loads(done.stdout), strict=True)}


@pytest.mark.slow
@pytest.mark.skipif(not CAN_HAVE_MXNET, reason="MXNet needs NumPy below 1.24, which is not built for this Python")
@pytest.mark.parametrize(("path", "block", "shown"), ELSEWHERE)
def test_blocks_for_mxnet_run_and_print_what_is_shown(
    path: Path, block: Block, shown: Block | None, ran_elsewhere: dict[tuple[Path, int], tuple[str, str]]
) -> None:
    printed, failed = ran_elsewhere[path, block.line]
    assert not failed, f"{label(path)}:{block.line}\n{failed}"
    if shown is not None:
        check_printed(shown, path, printed)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "block", "shown"), list(elsewhere("triton")))
def test_blocks_for_triton_run_and_print_what_is_shown(
    path: Path, block: Block, shown: Block | None, tmp_path: Path
) -> None:
    """As a file, whose source Triton reads."""
    file = tmp_path / "own_score.py"
    file.write_text(block.text, encoding="utf-8")
    done = run_process(sys.executable, file, env=os.environ | {"TRITON_INTERPRET": "1"})
    if shown is not None:
        check_printed(shown, path, done.stdout)


def run(block: Block, path: Path, module: ModuleType) -> str:
    """What a block prints; tracebacks name the document and its lines."""
    code = compile("\n" * block.line + block.text, str(path), "exec", flags=0, dont_inherit=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, vars(module))
    return out.getvalue()


def test_the_readme_shows_code_and_what_it_prints() -> None:
    found = blocks(ROOT / "README.md")
    assert sum(block.language == "python" for block in found) >= 2
    assert any(block.language == "text" and block.follows for block in found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_every_block_says_its_language(path: Path) -> None:
    known = {"python", "text", "bash", "bibtex", "console", "toml", "math", "mermaid", "html", "dockerfile"}
    assert {block.language for block in blocks(path)} <= known


def test_fences_are_found() -> None:
    text = "a\n\n```python\nx = 1\n```\n\n```text\n1\n```\nbetween\n```bash\nls\n```\n"
    matches = [(m["language"], m["text"]) for m in FENCE.finditer(text)]
    assert matches == [("python", "x = 1\n"), ("text", "1\n"), ("bash", "ls\n")]


# ------------------------------------------------------------------ the shell


def shell_lines(path: Path) -> list[list[str]]:
    """Commands in words, without prompts and comments."""
    found = []
    for block in blocks(path):
        if block.language in ("bash", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if block.language == "bash" or line.startswith("$ "):
                    words = shlex.split(line.removeprefix("$ "), comments=True)
                    found += [words] if words else []
    return found


COMMANDS = [
    pytest.param(words, id=f"{label(path)}: {' '.join(words)}"[:100])
    for path in with_language("bash", "console")
    for words in shell_lines(path)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_shell_lines_name_what_exists(words: list[str]) -> None:
    words = [word for i, word in enumerate(words) if i or "=" not in word]
    program, *arguments = words
    if program == "attnscore" or words[:3] == ["python", "-m", "attnscore"]:
        check_command(arguments if program == "attnscore" else arguments[2:])
    elif program == "make":
        check_targets(arguments)
    elif program == "pip" and arguments[0] == "install":
        check_extras(arguments[1:])
    elif words[:3] == ["python", "-m", "timeit"]:
        setup, statement = words[words.index("-s") + 1], words[-1]
        names: dict[str, Any] = {}
        exec(setup, names)
        exec(statement, names)
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]), words
    elif program in ("bash", "python", "sh"):
        assert any((ROOT / argument).exists() for argument in arguments), words
    else:
        # Left: cd, git clone and their like; nothing of ours could be misspelt in them.
        assert program in ("cd", "git", "source", "apt-get", "export", "torchrun"), words


def check_command(arguments: list[str]) -> None:
    """Parse without running: the command exists, and so do its options."""
    from typer.main import get_command

    from attnscore.cli.app import app

    group: Any = get_command(app)
    assert arguments, "attnscore without a command"
    if arguments[0].startswith("-"):
        assert arguments[0] in ("--help", "--version", "-h"), arguments
        return
    command = group.commands[arguments[0]]
    context = command.context_class(command, info_name=arguments[0])
    rest = [word for word in arguments[1:] if word not in ("--help", "-h")]
    # A bare --causal is the command's own business (see cli/options.py).
    rest = ["--causal=top_left" if word == "--causal" else word for word in rest]
    command.make_parser(context).parse_args(args=rest)


def test_an_unknown_option_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        check_command(["attend", "in.npz", "--uot", "out.npz"])
    with pytest.raises(KeyError):
        check_command(["atend"])


def check_targets(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [word for word in arguments if "=" not in word]
    assert all(re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in targets), targets


def check_extras(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for word in arguments for extra in re.findall(r"\[([\w,-]+)\]", word)}
    extras = {extra for group in named for extra in group.split(",")}
    assert extras <= set(project["optional-dependencies"])


def test_extras_named_in_the_text_exist() -> None:
    for path in DOCUMENTS:
        for words in re.findall(r"pip install ('[^']*'|\S+)", path.read_text(encoding="utf-8")):
            check_extras([words])


# ------------------------------------------------------------------ links


LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")


def anchors(path: Path) -> set[str]:
    """The names that a document's headings get as link targets."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for match in LINK.finditer(FENCE.sub("", path.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        there = (path.parent / target).resolve() if target else path
        exists = there.exists() and there.is_relative_to(ROOT)
        if not exists or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(match["target"])
    assert not broken


def test_every_page_is_reached_from_the_index() -> None:
    """By links, from the README or the index, over other pages."""
    reached, waiting = set(), [ROOT / "README.md", ROOT / "docs" / "index.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or not path.exists() or path.suffix != ".md":
            continue
        reached.add(path)
        targets = (match["target"].partition("#")[0] for match in LINK.finditer(path.read_text(encoding="utf-8")))
        waiting += [(path.parent / target).resolve() for target in targets if target and "://" not in target]
    assert not [label(path) for path in DOCUMENTS if path not in reached]


# ------------------------------------------------------------------ names


def test_names_in_the_documents_exist() -> None:
    """`ats.something` in prose or tables is a public name: a rename must reach the documents too."""
    import attnscore

    for path in DOCUMENTS:
        for name in re.findall(r"\bats\.([A-Za-z_]\w*)", path.read_text(encoding="utf-8")):
            assert hasattr(attnscore, name), f"{label(path)}: ats.{name}"


# ------------------------------------------------------------------ numbers


def rows_of_tables(path: Path) -> list[list[str]]:
    lines = FENCE.sub("", path.read_text(encoding="utf-8")).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_readmes_times_are_rows_of_the_page_of_performance() -> None:
    """Which `python benchmarks --page` makes from the files of results."""
    page = rows_of_tables(PERFORMANCE)
    rows = rows_of_tables(ROOT / "README.md")
    for title, count in (("whole model", 5), ("times as fast", 3)):
        head = next(row for row in rows if row[0].startswith(title))
        shown = rows[rows.index(head) + 2 :][:count]
        assert any(float(cell) < 1 for row in shown for cell in row[2:] if cell), "also slower ones"
        assert not [row for row in shown if row not in page]
        assert ["", *head[1:]] in page, "the machines in the order of the page"


def test_the_readmes_badges_are_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    badges = re.findall(r"badge/(\w+)-(\S+)-\w+\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert dict(badges) == {"license": project["license"].replace("-", "--"), "python": "_|_".join(classified)}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_page_stands_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert not [page for page in pages if not re.search(rf" {re.escape(page)}$", text, re.MULTILINE)]
    named = re.findall(r": (\S+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted([*pages, "reference.md"])  # the last is made from the docstrings


def test_the_readme_tells_of_every_score_and_mask_and_the_index_of_every_public_name() -> None:
    import attnscore
    from test_public_api import MASKS, SCORES

    for page, names in (("README.md", (*SCORES, *MASKS)), ("docs/index.md", attnscore.__all__)):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not [name for name in names if f"`{name}`" not in text], page


def test_llms_txt_has_fifteen_pages_of_the_navigation_with_a_sentence_each() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    hook = runpy.run_path(str(ROOT / "docs" / "llms.py"))
    text = hook["llms"](config["site_name"], config["site_description"], config["nav"], ROOT / "docs")
    assert text.startswith(f"# attnscore\n\n> {config['site_description']}\n\n")
    links = re.findall(r"(?m)^- \[([^\]]+)\]\(([\w/-]+)\.html\): ([A-Z`*].{20,220}\.)$", text)
    assert [(f"{page}.md", title) for title, page, _ in links] == [
        (page, title) for page, title in hook["pages"](config["nav"]) if page in hook["PAGES"]
    ]
    assert len(links) == text.count("\n- ") == 15
    assert "[Masks](masks.html): A mask says which keys each query may attend to." in text


def test_the_site_has_every_public_name_of_each_framework() -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    text = reference["page"]()
    named = [name for module in reference["MODULES"] for name, _ in reference["names"](importlib.import_module(module))]
    for name in named:
        assert text.count(f"\n### {name}\n\n```text\n") == named.count(name), name
    assert "class MaskError(AttnscoreError, ValueError)" in text and "attend(\n    query,\n" in text
    assert "- `sink`: number or (heads,)  \n" in text
    outside = FENCE.sub("", text)
    assert "``" not in outside and " at 0x" not in text and "\n----" not in outside
    assert not re.search(r"(?<!\\)\]\(", outside), "an index in front of a call, read as a link"


# ------------------------------------------------------------------ examples


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=label)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA complains of slow compilation where the machine is busy
    # MXNet uses names of its own, and of NumPy 1.23, that were on their way out.
    old = path.name.startswith("mxnet")
    if old and not CAN_HAVE_MXNET:
        pytest.skip("MXNet needs NumPy below 1.24, which is not built for this Python")
    environment |= MXNET_VARIABLES if old else {}
    python = [MXNET, "-W", "error", "-W", "ignore::DeprecationWarning"] if old else [sys.executable, "-W", "error"]
    # Those that train a model for most of a minute have a short form.
    short = ["--quick"] if '"--quick"' in path.read_text(encoding="utf-8") else []
    done = run_process(*python, path, *short, cwd=tmp_path, env=environment)
    assert not [line for line in done.stderr.splitlines() if not TENSORFLOW_LOG.match(line)]
    assert done.stdout.strip(), "an example shows something"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_say_what_they_show_and_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) < 80


def test_there_are_examples_for_every_framework_and_use() -> None:
    assert len(EXAMPLES) >= 4
    texts = [path.read_text(encoding="utf-8") for path in EXAMPLES]
    assert any("import torch" in text for text in texts)
    assert any("import numpy" in text and "torch" not in text for text in texts)
