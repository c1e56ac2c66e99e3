"""Heat maps: structure of the figures, what may come in, legibility, errors. No picture is compared by pixels."""

import io
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from attnscore.drawing import GREY, short_number, two_decimals
from attnscore.errors import FrameworkError, ShapeError
from attnscore.plotting import show_attention, show_head_grid, show_heatmaps

RNG = np.random.default_rng(0)
TOKENS = ["[CLS]", "the", "cats", ",", "worth", "$", "5", "or", "$", "6", ",", "sat", "[SEP]"]


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def panels(figure):
    return [axis for axis in figure.axes if axis.images]


def labels(ticks):
    return [text.get_text() for text in ticks]


def test_textbook_call():
    figure = show_heatmaps(np.eye(10).reshape(1, 1, 10, 10), xlabel="Keys", ylabel="Queries")
    (axis,) = panels(figure)
    assert axis.get_xlabel() == "Keys" and axis.get_ylabel() == "Queries"
    assert axis.images[0].get_array().shape == (10, 10)
    assert axis.images[0].get_cmap().name == "Reds"
    assert len(figure.axes) == 2, "one map and one colour bar"
    assert png(figure).startswith(b"\x89PNG")


def test_queries_go_down_and_keys_across():
    weights = np.zeros((3, 5))
    weights[2, 4] = 1
    (axis,) = panels(show_heatmaps(weights, "Keys", "Queries"))
    assert axis.images[0].get_array()[2, 4] == 1
    bottom, top = axis.get_ylim()
    assert bottom > top, "row 0 is at the top"


def test_grid_shares_one_colour_scale_and_labels_the_edges():
    maps = RNG.random((2, 3, 4, 5))
    maps[1, 2, 0, 0] = 7.0
    figure = show_heatmaps(maps, "Keys", "Queries", titles=["a", "b", "c"])
    axes = panels(figure)
    assert len(axes) == 6 and len(figure.axes) == 7
    assert {axis.images[0].get_clim() for axis in axes} == {(0.0, 7.0)}
    assert [axis.get_title() for axis in axes] == ["a", "b", "c"] * 2
    assert [axis.get_xlabel() for axis in axes] == [""] * 3 + ["Keys"] * 3
    assert [axis.get_ylabel() for axis in axes] == ["Queries", "", ""] * 2


def test_titles_for_every_single_map():
    titles = [["a", "b"], ["c", "d"]]
    figure = show_heatmaps(RNG.random((2, 2, 3, 3)), "k", "q", titles=titles, figsize=(6, 5), cmap="Blues")
    assert [axis.get_title() for axis in panels(figure)] == ["a", "b", "c", "d"]
    assert tuple(figure.get_size_inches()) == (6, 5)


VALUES = [[[[0.25, 0.75], [1.0, 0.0]]]]


@pytest.mark.parametrize(
    "matrices",
    [
        VALUES,
        np.array(VALUES, np.float16),
        torch.tensor(VALUES, requires_grad=True),
        torch.tensor(VALUES).bfloat16(),
        [[torch.tensor(VALUES[0][0], requires_grad=True)]],
        [[np.array(VALUES[0][0])]],
    ],
    ids=["lists", "float16", "with gradient", "bfloat16", "lists of tensors", "lists of arrays"],
)
def test_any_kind_of_array(matrices):
    (axis,) = panels(show_heatmaps(matrices, "k", "q"))
    assert np.array_equal(axis.images[0].get_array(), VALUES[0][0])


def test_ml_dtypes_bfloat16():
    import ml_dtypes

    (axis,) = panels(show_heatmaps(np.array(VALUES, ml_dtypes.bfloat16), "k", "q"))
    assert np.array_equal(axis.images[0].get_array(), VALUES[0][0])


def test_input_is_left_alone():
    weights = RNG.random((2, 2))
    before = weights.copy()
    png(show_heatmaps(weights, "k", "q"))
    assert np.array_equal(weights, before)


def test_masked_scores_are_grey_and_do_not_stretch_the_scale():
    scores = np.array([[1.0, -np.inf], [np.nan, 3.0]])
    (axis,) = panels(show_heatmaps(scores, "k", "q"))
    image = axis.images[0]
    assert image.get_clim() == (0.0, 3.0)
    assert image.get_array().mask.tolist() == [[False, True], [True, False]]
    assert image.get_cmap().get_bad()[:3] == pytest.approx([int(GREY[1:3], 16) / 255] * 3)
    png(show_heatmaps(np.full((2, 2), -np.inf), "k", "q"))


@pytest.mark.parametrize("shape", [(1, 1, 0, 3), (1, 1, 3, 0), (1, 1, 1, 1), (1, 1, 1, 40), (1, 1, 40, 1)])
def test_odd_sizes(shape):
    png(show_heatmaps(np.zeros(shape), "k", "q"))


def test_tokens_are_on_both_axes():
    weights = RNG.random((len(TOKENS), len(TOKENS)))
    figure = show_attention(weights, TOKENS, titles=["layer 0, head 1"], suptitle="costs $5 and $6")
    (axis,) = panels(figure)
    assert labels(axis.get_xticklabels()) == TOKENS and labels(axis.get_yticklabels()) == TOKENS
    assert axis.get_title() == "layer 0, head 1"
    assert {text.get_rotation() for text in axis.get_xticklabels()} == {90.0}
    png(figure)


@pytest.mark.parametrize("length", [3, 30, 120, 400])
def test_labels_do_not_overlap(length):
    tokens = [f"token{place}" for place in range(length)]
    figure = show_attention(RNG.random((length, length)), tokens)
    figure.draw_without_rendering()
    (axis,) = panels(figure)
    for ticks, low, high in ((axis.get_xticklabels(), "x0", "x1"), (axis.get_yticklabels(), "y0", "y1")):
        boxes = sorted((text.get_window_extent() for text in ticks), key=lambda box: getattr(box, low))
        for before, after in itertools.pairwise(boxes):
            assert getattr(before, high) <= getattr(after, low) + 0.5


def test_labels_do_not_overlap_in_a_given_size():
    tokens = [f"token{place}" for place in range(80)]
    figure = show_attention(RNG.random((80, 80)), tokens, figsize=(4, 4))
    figure.draw_without_rendering()
    (axis,) = panels(figure)
    boxes = sorted((text.get_window_extent() for text in axis.get_yticklabels()), key=lambda box: box.y0)
    assert len(boxes) < 80
    assert all(one.y1 <= two.y0 + 0.5 for one, two in itertools.pairwise(boxes))


def test_panels_of_heads():
    figure = show_attention(RNG.random((5, 3, 4)), ["a", "b", "c"], list("wxyz"), titles=list("12345"))
    assert [axis.get_title() for axis in panels(figure)] == list("12345")
    assert len([axis for axis in figure.axes if not axis.axison]) == 1, "the sixth place is empty"
    png(figure)


def test_numbers_in_cells():
    (axis,) = panels(show_attention([[0.5, -0.001]], ["q"], ["a", "b"], numbers=True))
    assert labels(axis.texts) == ["0.50", "0.00"]


def test_head_grid_writes_numbers_and_scales_each_panel():
    figure = show_head_grid([[[1.5, 2.0], [0.25, 12.0]], [[1, 1], [1, 1]]], ["entropy", "ones"])
    first, second = panels(figure)
    assert labels(first.texts) == ["1.5", "2.0", "0.25", "12"]
    assert first.get_title() == "entropy" and second.get_title() == "ones"
    assert first.images[0].get_clim() != second.images[0].get_clim()
    png(figure)


def test_one_loud_head_does_not_hide_the_others():
    values = np.ones((6, 12))
    values[0, 2] = 118
    (axis,) = panels(show_head_grid(values + RNG.random((6, 12))))
    assert type(axis.images[0].norm).__name__ == "LogNorm"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: show_heatmaps(np.zeros(3), "k", "q"), ["matrices", "(rows, cols, query, key)", "(3,)"]),
        (lambda: show_heatmaps(np.zeros((1,) * 5), "k", "q"), ["matrices", "(1, 1, 1, 1, 1)"]),
        (lambda: show_heatmaps([[1, 2], [3]], "k", "q"), ["matrices", "(2,)", "(1,)"]),
        (lambda: show_heatmaps(np.zeros((1, 2, 3, 3)), "k", "q", ["a"]), ["titles", "2 of them", "1 of them"]),
        (lambda: show_attention(np.zeros((2, 3)), ["a"]), ["query_tokens", "2 of them", "1", "(1, 2, 3)"]),
        (lambda: show_attention(np.zeros((2, 3)), None, ["a"]), ["key_tokens", "3 of them"]),
        (lambda: show_attention(np.zeros((2, 2)), titles=["a", "b"]), ["titles", "1 of them", "2"]),
        (lambda: show_attention(np.zeros((1, 2, 3, 4))), ["weights", "(query, key)", "(1, 2, 3, 4)"]),
        (lambda: show_head_grid(np.zeros(4)), ["values", "(layer, head)", "(4,)"]),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ShapeError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_text_is_no_matrix():
    with pytest.raises(FrameworkError, match="an array of numbers, got str"):
        show_heatmaps("weights", "k", "q")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FrameworkError, match=r"pip install 'attnscore\[plot\]'"):
        show_heatmaps(np.zeros((2, 2)), "k", "q")


def test_nothing_global_is_touched_and_notebooks_get_a_picture():
    code = """
import sys
from attnscore import plotting
assert "matplotlib" not in sys.modules
figure = plotting.show_heatmaps([[1, 2], [3, 4]], "k", "q")
assert figure._repr_png_().startswith(b"\\x89PNG")
assert "matplotlib.pyplot" not in sys.modules
import pickle
pickle.loads(pickle.dumps(figure))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_short_numbers():
    assert [short_number(x, 3) for x in (118.2, 0.00248, -1.5, 1e9)] == ["118", "0.00248", "-1.50", "1e+09"]
    assert short_number(float("nan")) == "nan"
    assert two_decimals(-0.004) == "0.00"
