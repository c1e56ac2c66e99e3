"""Heat maps: structure of the figures, what may come in, legibility, errors. No picture is compared by pixels."""

import functools
import io
import itertools
import subprocess
import sys

import matplotlib
import matplotlib.colors
import ml_dtypes
import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.errors import ArgumentError, FrameworkError, ShapeError
from attnscore.plotting import (
    show_attention,
    show_head_grid,
    show_heatmaps,
    show_key_mass,
    show_long_attention,
    show_pooled_weights,
    show_top_weights,
)
from attnscore.plotting.drawing import GREY, heaviest_keys, short_number, two_decimals

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


def test_grid_shares_one_colour_scale_and_no_axes_and_labels_the_edges():
    maps = RNG.random((2, 3, 4, 5))
    maps[1, 2, 0, 0] = 7.0
    figure = show_heatmaps(maps, "Keys", "Queries", titles=["a", "b", "c"])
    axes = panels(figure)
    assert len(axes) == 6 and len(figure.axes) == 7
    assert {axis.images[0].get_clim() for axis in axes} == {(0.0, 7.0)}
    assert [axis.get_title() for axis in axes] == ["a", "b", "c"] * 2
    assert [axis.get_xlabel() for axis in axes] == [""] * 3 + ["Keys"] * 3
    assert [axis.get_ylabel() for axis in axes] == ["Queries", "", ""] * 2
    shared = [(axis, side) for axis in axes for side in (axis.get_shared_x_axes(), axis.get_shared_y_axes())]
    assert all(len(side.get_siblings(axis)) == 1 for axis, side in shared)
    ticks = [[axis.xaxis.get_tick_params()["labelbottom"], axis.yaxis.get_tick_params()["labelleft"]] for axis in axes]
    assert ticks == [[False, True], [False, False], [False, False], [True, True], [True, False], [True, False]]


def test_no_maps():
    assert not panels(show_heatmaps(np.zeros((0, 3, 3)), "Keys", "Queries"))


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
        np.array(VALUES, ml_dtypes.bfloat16),
        [[torch.tensor(VALUES[0][0], requires_grad=True)]],
        [[np.array(VALUES[0][0])]],
    ],
    ids=["lists", "float16", "with gradient", "bfloat16", "ml_dtypes", "lists of tensors", "lists of arrays"],
)
def test_any_kind_of_array(matrices):
    (axis,) = panels(show_heatmaps(matrices, "k", "q"))
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


def test_signed_scores_diverge_from_zero_and_weights_do_not():
    scores = np.array([[-1.0, 3.0], [-np.inf, 0.0]])
    for figure in (show_heatmaps(scores, "k", "q", label="score"), show_attention(scores), show_head_grid(scores)):
        image = figure.axes[0].images[0]
        assert image.get_clim() == (-3.0, 3.0) and image.get_cmap().name == "RdBu_r"
        red, green, blue, _ = image.to_rgba(np.array([0.0]))[0]
        assert min(red, green, blue) > 0.9, "0 is white"
    assert show_heatmaps(scores, "k", "q", label="score").axes[-1].get_ylabel() == "score"
    rounded = np.array([[1.0, -1e-9]])  # weights that rounding made negative stay on the scale of weights
    image = show_attention(rounded).axes[0].images[0]
    assert image.get_clim() == (0.0, 1.0) and image.get_cmap().name == "Reds"
    assert show_heatmaps(scores, "k", "q", cmap="Blues").axes[0].images[0].get_cmap().name == "Blues"


def test_text_has_the_colours_of_a_style_for_dark_pages():
    style = {"text.color": "white", "axes.labelcolor": "white", "xtick.color": "white", "figure.facecolor": "black"}
    with matplotlib.rc_context(style):
        figure = show_attention(np.eye(3), TOKENS[:3], suptitle="dark")
    axis = figure.axes[0]
    texts = [figure._suptitle, axis.xaxis.label, axis.get_xticklabels()[0], figure.axes[-1].yaxis.label]
    assert {matplotlib.colors.to_hex(text.get_color()) for text in texts} == {"#ffffff"}
    assert matplotlib.colors.to_hex(figure.get_facecolor()) == "#000000"


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
    assert labels(show_attention(np.eye(3), "abc").axes[0].get_xticklabels()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("length", "figsize"),
    [(3, None), (30, None), pytest.param(120, None, marks=pytest.mark.slow), (400, None), (80, (4, 4))],
)
@pytest.mark.slow_rows("400-None")
def test_labels_do_not_overlap(length, figsize):
    tokens = [f"token{place}" for place in range(length)]
    figure = show_attention(RNG.random((length, length)), tokens, figsize=figsize)
    figure.draw_without_rendering()
    (axis,) = panels(figure)
    for ticks, low, high in ((axis.get_xticklabels(), "x0", "x1"), (axis.get_yticklabels(), "y0", "y1")):
        boxes = sorted((text.get_window_extent() for text in ticks), key=lambda box: getattr(box, low))
        assert len(boxes) < length or figsize is None
        for before, after in itertools.pairwise(boxes):
            assert getattr(before, high) <= getattr(after, low) + 0.5


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


def test_a_head_grid_has_colours_for_each_statistic():
    figure = show_head_grid(np.ones((2, 2, 3)), ["rises", "falls"], cmap=["Reds", "Reds_r"])
    assert [axis.images[0].get_cmap().name for axis in panels(figure)] == ["Reds", "Reds_r"]


def test_one_loud_head_does_not_hide_the_others():
    values = np.ones((6, 12))
    values[0, 2] = 118
    (axis,) = panels(show_head_grid(values + RNG.random((6, 12))))
    assert type(axis.images[0].norm).__name__ == "LogNorm"


@pytest.mark.slow
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


HOSTILE = ["$x^$", "$$", "<b>", "&amp;", r"\frac{", "_a_b", "a\nb", "", "\N{GRINNING FACE}", "#%{}~^", r"\$5"]
WHOLE = "".join(HOSTILE)
SQUARE = RNG.random((len(HOSTILE),) * 2)
HOSTILE_CALLS = {
    "heatmaps": lambda: show_heatmaps(SQUARE, WHOLE, WHOLE, [WHOLE], label=WHOLE),
    "attention": lambda: show_attention(
        SQUARE, HOSTILE, titles=[WHOLE], suptitle=WHOLE, xlabel=WHOLE, ylabel=WHOLE, label=WHOLE
    ),
    "head grid": lambda: show_head_grid(SQUARE, [WHOLE], suptitle=WHOLE, xlabel=WHOLE, ylabel=WHOLE),
    "pooled weights": lambda: show_pooled_weights(SQUARE, query_len=11, key_len=11, titles=[WHOLE]),
    "key mass": lambda: show_key_mass(SQUARE[0], HOSTILE, titles=[WHOLE]),
    "top weights": lambda: show_top_weights(ats.top_weights(SQUARE, SQUARE, 2), HOSTILE, title=WHOLE),
    "long attention": lambda: show_long_attention(SQUARE, SQUARE, tokens=HOSTILE, title=WHOLE),
}


@pytest.mark.filterwarnings("ignore:Glyph .* missing")
@pytest.mark.parametrize("name", HOSTILE_CALLS)
@pytest.mark.slow_rows("head grid", "long attention")
def test_texts_of_the_caller_are_drawn_as_they_are(name):
    from matplotlib.text import Text

    with matplotlib.rc_context({"text.usetex": name == "key mass"}):
        figure = HOSTILE_CALLS[name]()
        texts = [text for text in figure.findobj(Text) if set(text.get_text()) & {"$", "\\"}]
        texts = [text for text in texts if "mathdefault" not in text.get_text()]  # matplotlib's own powers of ten
        assert texts and not any(text.get_parse_math() or text.get_usetex() for text in texts)
    if name != "key mass":  # its numbers would need LaTeX
        figure.draw_without_rendering()


# ---------------------------------------------------------------- long contexts

Q, K = RNG.normal(size=(2, 300, 8))
K[0] += 3 * Q.mean(0) / np.linalg.norm(Q.mean(0))  # a sink


def overlapping(figure):
    """Pairs of written words, anywhere in a figure, that cover each other."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    hidden = set()
    for side in (side for axis in figure.axes for side in (axis.xaxis, axis.yaxis)):
        low, high = sorted(side.get_view_interval())
        slack = 1e-9 * (high - low)
        for tick in (*side.get_major_ticks(), *side.get_minor_ticks()):
            if not low - slack <= tick.get_loc() <= high + slack:  # placed, and not drawn
                hidden |= {tick.label1, tick.label2}
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in hidden]
    boxes = [(text.get_text(), text.get_window_extent().padded(-0.5)) for text in shown]
    return [(one, two) for (one, a), (two, b) in itertools.combinations(boxes, 2) if one != two and a.overlaps(b)]


def test_pooled_map_counts_tokens_and_shows_what_a_query_gives():
    mask = ats.Causal()
    pooled = ats.pooled_weights(Q, K, (30, 30), mask=mask)
    figure = show_pooled_weights(pooled, query_len=300, key_len=300, titles=["a head"])
    (axis,) = panels(figure)
    image = axis.images[0]
    assert axis.get_xlim() == (0, 300) and axis.get_ylim() == (300, 0)
    shown = image.get_array()
    np.testing.assert_allclose(10 * shown.filled(0).sum(-1), 1)  # what one query gives: means of bins of 10 keys
    assert np.array_equal(shown.mask, np.triu(np.ones((30, 30), bool), 1)), "what the mask hides is grey"
    assert type(image.norm).__name__ == "LogNorm" and axis.get_title() == "a head"
    linear = show_pooled_weights(pooled, query_len=300, key_len=300, logarithmic=False)
    assert type(panels(linear)[0].images[0].norm).__name__ == "Normalize"


def test_pooled_maps_of_uneven_bins_and_of_several_heads():
    pooled = ats.pooled_weights(np.zeros((2, 7, 3)), np.zeros((2, 11, 3)), (3, 4))  # 3, 3, 1 and 3, 3, 3, 2
    figure = show_pooled_weights(pooled, query_len=7, key_len=11, titles=["one", "two"])
    assert [axis.get_title() for axis in panels(figure)] == ["one", "two"]
    for axis in panels(figure):
        np.testing.assert_allclose(axis.images[0].get_array().filled(0), np.full((3, 4), 1 / 11))
        assert axis.images[0].get_extent() == [0, 12, 9, 0], "bins of one width reach beyond the last position"
        assert axis.get_xlim() == (0, 11) and axis.get_ylim() == (7, 0)
    assert not overlapping(figure)


@pytest.mark.parametrize("bins", [7, 16, 64])
@pytest.mark.parametrize("length", [1, 7, 100, 1000, 1001])
@pytest.mark.slow_rows("1-*", "100-*", "7-16", "1000-16")
def test_uniform_attention_is_one_flat_colour_without_sinks(length, bins):
    key = 1e-7 * RNG.normal(size=(length, 2))  # even to rounding
    query = RNG.normal(size=(length, 2))
    pooled = ats.pooled_weights(query, key, (bins, bins))
    for figure in (
        show_pooled_weights(pooled, query_len=length, key_len=length),
        show_long_attention(query, key, bins=(bins, bins)),
    ):
        image = figure.axes[0].images[0]
        colours = image.to_rgba(image.get_array()).reshape(-1, 4)
        assert len(np.unique(colours, axis=0)) == 1 and 0.2 < colours[0, 1] < 0.6, "neither pale nor dark"
    _, near, line, bars, points = figure.axes[:5]
    block = near.images[0]
    assert len(np.unique(block.to_rgba(block.get_array()).reshape(-1, 4), axis=0)) == 1
    assert len(points.collections[0].get_offsets()) == (1 if length == 1 else 0)
    assert points.get_title() == (
        "1 strongest keys of 1 queries"
        if length == 1
        else f"4 strongest keys of {min(length, 256)} queries,\nties left out"
    )
    assert points.collections[0].get_clim() == (0, 1)
    if length > 8:
        assert labels(bars.get_yticklabels()) == [f"{length:,} keys, tied"] and not line.lines[-1].get_xdata().size
    else:
        assert sorted(labels(bars.get_yticklabels())) == [str(i) for i in range(length)]
    assert len({text.split(".")[0] for text in labels(bars.texts)}) == 1, "all receive the same weight"


def test_a_sink_is_seen_beside_uniform_weights():
    query, key = np.ones((1001, 2)), np.zeros((1001, 2))
    key[500] = 6
    figure = show_long_attention(query, key, bins=(64, 64), k=2)
    whole, _, line, bars, points = figure.axes[:5]
    darkest = np.argmax(whole.images[0].get_array(), axis=-1)
    assert set(darkest.tolist()) == {500 // 16}
    assert labels(bars.get_yticklabels()) == ["500", "1,000 keys, tied"]
    assert line.lines[-1].get_xdata().tolist() == [500.5]
    assert {x for x, _ in points.collections[0].get_offsets().tolist()} == {500.5}
    assert points.get_title() == "2 strongest keys of 256 queries,\nties left out"
    assert not overlapping(figure)


def test_edges_have_the_colours_of_their_weights_from_0_to_1():
    alone, beside = (
        [tuple(line.get_color()) for line in show_top_weights((weights, [[0], [1]])).axes[0].lines]
        for weights in ([[0.004], [0.0]], [[0.004], [1.0]])
    )
    assert alone == beside[:1] != beside[1:], "a small weight is as pale alone as beside a large one"
    many = show_top_weights(([[0.004]] * 100, [[0]] * 100))
    assert many.axes[0].collections[0].get_clim() == (0, 1)


def test_queries_with_tied_weights_are_counted_and_not_drawn():
    query = np.zeros((5, 2))
    query[4] = 3
    key = np.zeros((5, 2))
    key[2] = 1
    axis = show_top_weights(ats.top_weights(query, key, 2)).axes[0]
    assert {tuple(line.get_ydata()) for line in axis.lines if line.get_ydata()[1] == 2} == {(4, 2)}
    assert axis.get_xlabel() == "not drawn: 4 queries whose largest weights are tied"
    every = show_top_weights(ats.top_weights(query, key, 5)).axes[0]
    assert len(every.lines) == 25 and every.get_xlabel() == ""


def test_heaviest_keys_are_tied_or_not():
    mass = np.array([2.0, np.nan, 3.0, 2.0, 0.0, 3.0 * (1 - 1e-6), np.inf])
    assert [keys.tolist() for keys in heaviest_keys(mass, 5)] == [[6], [2], [5], [0], [3]]
    assert [keys.tolist() for keys in heaviest_keys(mass, 4)] == [[6], [2], [5], [0, 3]]
    assert [keys.tolist() for keys in heaviest_keys(mass, 2)] == [[6], [2, 5]]
    assert [keys.tolist() for keys in heaviest_keys(mass, 1)] == [[6]]
    assert heaviest_keys(mass, 0) == heaviest_keys(np.zeros(3), 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0), (1, 1), (2, 4000)])
def test_long_pictures_of_odd_sizes(lengths):
    query, key = np.zeros((lengths[0], 2)), np.zeros((lengths[1], 2))
    pooled = ats.pooled_weights(query, key, (5, 5))
    png(show_pooled_weights(pooled, query_len=lengths[0], key_len=lengths[1]))
    png(show_key_mass(ats.key_mass(query, key)))
    if lengths[1]:
        png(show_top_weights(ats.top_weights(query, key, 1)))
    png(show_long_attention(query, key))


@pytest.mark.parametrize("kind", ["lists", "tensor", "gradient", "bfloat16", "float16"])
def test_long_pictures_of_any_array(kind):
    made = {
        "lists": lambda x: x.tolist(),
        "tensor": torch.from_numpy,
        "gradient": lambda x: torch.from_numpy(x).requires_grad_(),
        "bfloat16": lambda x: torch.from_numpy(x).bfloat16(),
        "float16": lambda x: x.astype(np.float16),
    }[kind]
    pooled = np.array([[2.0, 0.0], [1.0, 1.0]])
    (axis,) = panels(show_pooled_weights(made(pooled), query_len=4, key_len=4))
    assert axis.images[0].get_array().filled(0).tolist() == [[0.5, 0], [0.25, 0.25]]
    bars = show_key_mass(made(np.array([1.0, 3.0]))).axes[1]
    assert labels(bars.get_yticklabels()) == ["1", "0"]
    links = show_top_weights((made(np.array([[1.0], [0.5]])), [[0], [1]]))
    assert len(links.axes[0].lines) == 2


@pytest.mark.slow
def test_key_mass_names_the_heaviest_and_keeps_one_key_among_many_visible():
    mass = np.ones(100_003)
    mass[[0, 77_777]] = 5000.0, 40.0
    figure = show_key_mass(mass, heaviest=3)
    line, bars = figure.axes
    assert labels(bars.get_yticklabels()) == ["0", "77,777", "100,001 keys, tied"]
    assert labels(bars.texts) == [" 5000", " 40.0", " 1.00"]
    stairs = [patch for patch in line.patches if type(patch).__name__ == "StepPatch"]
    values = stairs[-1].get_data().values
    assert len(values) <= 1200 and values[0] == 5000 and values.max() == 5000 and (values == 40).sum() == 1
    assert line.get_yscale() == "log" and line.get_xlim() == (0, 100_003)
    assert not overlapping(figure)


@pytest.mark.parametrize("logarithmic", [True, False])
def test_bars_of_the_heaviest_keys_have_the_scale_of_the_line(logarithmic):
    mass = np.array([20_000.0, 6.0, 0.2, 5.0, 0.1])
    figure = show_key_mass(mass, heaviest=3, logarithmic=logarithmic)
    line, bars = figure.axes
    assert bars.get_xscale() == line.get_yscale() == ("log" if logarithmic else "linear")
    assert bars.get_xlim()[0] == line.get_ylim()[0]
    assert bars.get_xlabel() == ("log scale" if logarithmic else "")
    figure.canvas.draw()
    lengths = [bar.get_window_extent().width / bars.get_window_extent().width for bar in bars.patches]
    assert (min(lengths) > 0.2) == logarithmic and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("mass", [[np.inf, 1.0, 2.0], [np.inf] * 3, [np.inf, *np.ones(3000), np.nan]])
@pytest.mark.parametrize("logarithmic", [True, False])
def test_an_infinite_key_mass_sets_no_limits(mass, logarithmic):
    figure = show_key_mass(mass, logarithmic=logarithmic)
    line, bars = figure.axes
    assert labels(bars.texts)[0] == " inf" and np.isfinite([*bars.get_xlim(), *line.get_ylim()]).all()
    assert max(bar.get_width() for bar in bars.patches) == (2 if len(mass) == 3 and 2 in mass else 1)
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.slow
def test_key_mass_with_tokens_that_are_long_or_formulas():
    tokens = ["$x^2$", "a" * 60, "[SEP]", "</s>"]
    figure = show_key_mass([4.0, 3.0, 0.0, 1.0], tokens, titles=["head 3"])
    bars = figure.axes[1]
    assert labels(bars.get_yticklabels()) == ["0  $x^2$", "1  " + "a" * 15 + "…", "3  </s>"], (
        "a key of no weight is none"
    )
    assert not overlapping(figure)


@pytest.mark.slow
def test_key_mass_of_several_heads():
    figure = show_key_mass(RNG.random((3, 50)), titles=["a", "b", "c"])
    assert [axis.get_title() for axis in figure.axes[::2]] == ["a", "b", "c"]
    assert not overlapping(figure)


@pytest.mark.slow
def test_links_between_words():
    tokens = [f"word{i}" for i in range(20)]
    found = ats.top_weights(Q[:20], K[:20], 2, mask=ats.Causal())
    figure = show_top_weights(found, tokens, title="head 3")
    axis = figure.axes[0]
    assert len(axis.lines) == (found.index >= 0).sum()
    ends = {tuple(line.get_ydata()) for line in axis.lines}
    assert ends == {(i, j) for i, row in enumerate(found.index.tolist()) for j in row if j >= 0}
    heavy = max(axis.lines, key=lambda line: line.get_linewidth())
    row = int(heavy.get_ydata()[0])
    assert found.weights[row].max() == found.weights.max()
    assert labels(axis.get_yticklabels()) == tokens
    assert not overlapping(figure)


def test_links_of_long_inputs_are_points():
    found = ats.top_weights(Q, K, 3, mask=ats.Causal())
    figure = show_top_weights(found, key_len=300)
    (points,) = figure.axes[0].collections
    assert len(points.get_offsets()) == (found.index >= 0).sum() == 3 * 300 - 3
    weights = points.get_array()
    assert (np.diff(weights) >= 0).all(), "the largest lie on top"
    assert figure.axes[0].get_xlim() == (0, 300) and figure.axes[0].get_ylim() == (300, 0)
    some = show_top_weights((found.weights[::10], found.index[::10]), query_index=np.arange(0, 300, 10), key_len=300)
    assert figure.axes[0].get_xlim() == some.axes[0].get_xlim()


def test_the_old_name_of_the_edges_warns_and_works():
    edges = [[1.0]], [[0]]
    with pytest.warns(DeprecationWarning, match=r"show_top_weights\(top_weights=\).*until 0\.2") as caught:
        figure = show_top_weights(found=edges)
    assert caught[0].filename == __file__
    assert len(figure.axes[0].lines) == len(show_top_weights(top_weights=edges).axes[0].lines) == 1
    with pytest.raises(TypeError, match="found"):
        show_top_weights(top_weights=edges, found=edges)


def test_lines_have_room_for_all_keys():
    axis = show_top_weights(([[1.0]], [[0]]), key_len=10).axes[0]
    assert axis.get_ylim() == (9.6, -0.6)


def test_points_are_bounded_at_any_length():
    rows = 50_000
    found = np.full((rows, 2), 0.5), np.tile([[0, 7]], (rows, 1))
    (points,) = show_top_weights(found).axes[0].collections
    assert len(points.get_offsets()) == 40_000


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.slow_rows("numpy", "torch")
def test_a_long_call_at_a_glance(framework):
    query, key = (Q, K) if framework == "numpy" else map(torch.from_numpy, (Q, K))
    tokens = [f"token{i}" for i in range(300)]
    figure = show_long_attention(query, key, mask=ats.Causal(), bins=(30, 30), tokens=tokens, zoom=(250, 100))
    whole, near, line, bars, points = figure.axes[:5]
    exact = ats.attention_weights(Q, K, mask=ats.Causal())
    np.testing.assert_allclose(near.images[0].get_array(), exact[226:274, 76:124], rtol=1e-6)
    assert near.images[0].get_extent() == [76, 124, 274, 226]
    assert whole.images[0].get_array().shape == (30, 30)
    (ring,) = whole.lines
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (100, 250)
    heaviest = int(exact.sum(0).argmax())
    assert labels(bars.get_yticklabels())[0] == f"{heaviest}  token{heaviest}"
    assert len(points.collections[0].get_offsets()) > 900 and line.get_xlim() == (0, 300)
    assert not overlapping(figure)


def test_the_exact_block_is_laid_around_the_strongest_link():
    query, key = np.zeros((2, 200, 4))
    query[150, 0] = key[120, 0] = 5
    figure = show_long_attention(query, key)
    (ring,) = figure.axes[0].lines
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (120, 150)
    assert figure.axes[1].images[0].get_extent() == [96, 144, 174, 126]


def test_one_head_of_several_is_chosen():
    query, key = RNG.normal(size=(2, 1, 4, 60, 8))
    figure = show_long_attention(query, key, place=(0, 2), bins=(60, 60), zoom=(30, 30), zoom_size=10)
    exact = ats.attention_weights(query[0, 2], key[0, 2])
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), exact, rtol=1e-12)
    np.testing.assert_allclose(figure.axes[1].images[0].get_array(), exact[25:35, 25:35], rtol=1e-12)


MAPS, EDGES = np.ones((4, 3, 3)), ([[1.0]], [[0]])
pooled = functools.partial(show_pooled_weights, query_len=3, key_len=3)


def check_error(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: show_heatmaps(np.zeros(3), "k", "q"), ShapeError, ["matrices", "(rows, cols, query, key)", "(3,)"]),
        (lambda: show_heatmaps(np.zeros((1,) * 5), "k", "q"), ShapeError, ["matrices", "(1, 1, 1, 1, 1)"]),
        (lambda: show_heatmaps([[1, 2], [3]], "k", "q"), ShapeError, ["matrices", "(2,)", "(1,)"]),
        (lambda: show_heatmaps("weights", "k", "q"), FrameworkError, ["an array of numbers, got str"]),
        (lambda: show_heatmaps(MAPS[None, :2], "k", "q", ["a"]), ShapeError, ["titles", "2 of them", "1 of them"]),
        (
            lambda: show_heatmaps(MAPS, "k", "q", "abcd"),
            ArgumentError,
            ["titles: expected a list of texts, got 'abcd'"],
        ),
        (lambda: show_attention(np.zeros((2, 3)), ["a"]), ShapeError, ["query_tokens", "2 of them", "1", "(1, 2, 3)"]),
        (lambda: show_attention(np.zeros((2, 3)), None, ["a"]), ShapeError, ["key_tokens", "3 of them"]),
        (lambda: show_attention(np.zeros((2, 2)), titles=["a", "b"]), ShapeError, ["titles", "1 of them", "2"]),
        (lambda: show_attention(np.zeros((1, 2, 3, 4))), ShapeError, ["weights", "(query, key)", "(1, 2, 3, 4)"]),
        (lambda: show_attention(MAPS, max_cols=0), ArgumentError, ["max_cols", "above 0", "got 0"]),
        (lambda: show_head_grid(np.zeros(4)), ShapeError, ["values", "(layer, head)", "(4,)"]),
        (lambda: show_head_grid(MAPS, "abcd"), ShapeError, ["titles: expected a list of texts, got 'abcd'"]),
        (lambda: show_head_grid(MAPS, cmap=["Reds"]), ShapeError, ["cmap: expected 4 of them, got 1"]),
    ],
)
def test_bad_input_is_named(call, error, words):
    check_error(call, error, words)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pooled(np.ones(3)), ShapeError, ["pooled", "(3,)"]),
        (lambda: pooled(MAPS[0], query_len=2), ArgumentError, ["query_len", "(3)", "2"]),
        (lambda: pooled(MAPS[0], key_len=3.5), ArgumentError, ["key_len", "3.5"]),
        (lambda: pooled(np.ones((1, 64)), key_len=100), ArgumentError, ["key_len", "width"]),
        (lambda: pooled(np.ones((1, 1)), key_len=-1), ArgumentError, ["key_len", "-1"]),
        (lambda: pooled(MAPS[0], titles=["a", "b"]), ShapeError, ["titles", "1 of them", "2"]),
        (lambda: pooled(MAPS[0], max_cols=2.5), ArgumentError, ["max_cols", "above 0", "2.5"]),
        (lambda: show_key_mass(np.ones((1, 1, 3))), ShapeError, ["mass", "(key)", "(1, 1, 3)"]),
        (lambda: show_key_mass(np.ones(3), ["a"]), ShapeError, ["tokens", "3 of them", "1"]),
        (lambda: show_key_mass(np.ones(3), heaviest=-1), ArgumentError, ["heaviest", "-1"]),
    ],
)
def test_bad_input_of_bins_and_key_masses_is_named(call, error, words):
    check_error(call, error, words)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: show_top_weights(np.ones((2, 2, 2))), ShapeError, ["top_weights: expected the result of"]),
        (lambda: show_top_weights((MAPS, MAPS)), ShapeError, ["top_weights", "(query, k)", "head"]),
        (lambda: show_top_weights(([[1.0]], [[4]]), ["a"], ["b", "c"]), ShapeError, ["key_tokens", "at least 5"]),
        (lambda: show_top_weights(([[1.0], [1.0]], [[0], [0]]), ["a"]), ShapeError, ["query_tokens", "at least 2"]),
        (lambda: show_top_weights(EDGES, query_index=[1, 2]), ShapeError, ["query_index", "1 of them"]),
        (lambda: show_top_weights(EDGES, key_len=6.5), ArgumentError, ["key_len", "6.5"]),
        (lambda: show_top_weights(EDGES, key_len=-4), ArgumentError, ["key_len", "-4"]),
        (lambda: show_long_attention(MAPS, MAPS), ShapeError, ["place", "(4,)"]),
        (lambda: show_long_attention(MAPS, MAPS, place=(4,)), ShapeError, ["place", "(4,)"]),
        (lambda: show_long_attention(Q, K, zoom=(300, 0)), ArgumentError, ["zoom", "(300, 300)"]),
        (lambda: show_long_attention(Q, K, k=0), ArgumentError, ["k", "0"]),
        (lambda: show_long_attention(Q, K, tokens=["a"]), ShapeError, ["tokens", "300 of them"]),
        (lambda: show_long_attention(Q, K, bins=3), ArgumentError, ["bins"]),
    ],
)
def test_bad_input_of_edges_and_long_pictures_is_named(call, error, words):
    check_error(call, error, words)


def test_without_matplotlib_the_extra_is_named_and_nothing_is_computed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("attnscore.plotting.long_contexts.key_mass", lambda *_, **__: pytest.fail("computed"))
    for call in (lambda: show_heatmaps(np.zeros((2, 2)), "k", "q"), lambda: show_long_attention(Q, K)):
        with pytest.raises(FrameworkError, match=r"pip install 'attnscore\[plot\]'"):
            call()


@pytest.mark.parametrize("shape", [(1, 200), (3, 500), (300, 4)])
def test_maps_much_longer_than_wide_fill_their_panel(shape):
    figure = show_attention(np.full(shape, 0.5))
    figure.canvas.draw()
    box, axis = figure.axes[0].get_window_extent(), figure.axes[0]
    assert min(box.width, box.height) > 40
    assert all(tick == int(tick) for ticks in (axis.get_xticks(), axis.get_yticks()) for tick in ticks)


@pytest.mark.parametrize("made", [np.array, tuple, list])
@pytest.mark.parametrize("names", [["a", "b", "c"], [1, 2, 3]], ids=["texts", "numbers"])
@pytest.mark.slow_rows("*-tuple", "numbers-list", "texts-*", "numbers-array")
def test_names_are_written_as_texts(made, names):
    wanted, names, maps = [str(name) for name in names], made(names), np.ones((3, 3, 3)) / 3
    figure = show_attention(maps, names, names, titles=names)
    assert labels(figure.axes[0].get_xticklabels()) == labels(figure.axes[0].get_yticklabels()) == wanted
    assert [axis.get_title() for axis in panels(figure)] == wanted
    assert [axis.get_title() for axis in panels(show_heatmaps(maps, "Keys", "Queries", titles=names))] == wanted
    by_row = show_heatmaps(maps[None].repeat(2, 0), "Keys", "Queries", titles=np.array([names, names]))
    assert [axis.get_title() for axis in panels(by_row)] == wanted * 2
    for figure in (
        show_head_grid(maps, titles=names),
        show_pooled_weights(maps, query_len=3, key_len=3, titles=names),
        show_key_mass(maps[0], names, titles=names),
    ):
        assert [axis.get_title() for axis in figure.axes if axis.get_title() in wanted] == wanted
    assert labels(show_key_mass([3.0, 2.0, 1.0], names).axes[1].get_yticklabels())[0] == f"0  {wanted[0]}"
    links = show_top_weights((np.ones((3, 1)), [[0], [1], [2]]), names)
    assert labels(links.axes[0].get_yticklabels()) == wanted
    png(show_long_attention(np.eye(3), np.eye(3), tokens=names))


@pytest.mark.parametrize(
    ("shape", "titles"),
    [
        ((3, 4, 4), ["layer 3, head 11: broad", "layer 0, head 7: first token", "layer 5, head 2: previous"]),
        ((2, 2, 3), ["one line that is long\nand another", "short"]),
        ((4, 20, 7), ["weights of the first head", "of the second one", "of the third", "and of the last head"]),
        ((1, 1, 2), None),
    ],
)
@pytest.mark.slow_rows("shape2-titles2")
def test_titles_of_small_maps_do_not_touch(shape, titles):
    figure = show_attention(np.full(shape, 0.25), list("abcdefghijklmnopqrst"[: shape[1]]), titles=titles)
    assert not overlapping(figure)
    label, page = figure.axes[-1].yaxis.label.get_window_extent(), figure.bbox
    assert page.y0 <= label.y0 and label.y1 <= page.y1, "the label of the colour bar is on the page"
