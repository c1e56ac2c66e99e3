"""The experiments on why scores are scaled: known numbers, laws, answers, and that a wrong one is seen."""

from __future__ import annotations

import dataclasses
import functools
import html
import inspect
import json
import re

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.cli import main
from attnscore.cli.lab import lab
from attnscore.diagnostics import page, scaling
from attnscore.diagnostics.lab import runs, torch_language_model, training
from attnscore.diagnostics.lab.experiment import Check, Estimate, estimate, exponent
from attnscore.diagnostics.lab.runs import Settings
from attnscore.diagnostics.lab.sharpening import JACOBIANS, LOGITS, WEIGHTS
from attnscore.diagnostics.lab.training import Plan, TrainingRuns, training_runs
from attnscore.diagnostics.lab.variance import DIMS, Coordinates, logit_variance
from attnscore.errors import ArgumentError

SMALL = Plan((4, 8), seeds=2, steps=6, width=8, batch=2, context=12)


@pytest.fixture(scope="module")
def variance():
    return quick("logit_variance")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return training_runs(SMALL, folder), folder


# ---------------------------------------------------------------- estimates


def test_an_exponent_is_found_with_its_interval() -> None:
    sizes = np.array([1.0, 2, 4, 8, 16, 32])
    assert exponent(sizes, 5 * sizes**-1.5) == pytest.approx((-1.5, 0.0), abs=1e-12)
    rng = np.random.default_rng(0)
    found = [exponent(sizes, sizes**0.5 * np.exp(0.1 * rng.normal(size=6))) for _ in range(400)]
    inside = np.mean([abs(one.value - 0.5) <= one.margin for one in found])
    assert 0.92 <= inside <= 0.98
    assert np.isnan(exponent([1, 2], [1, 2]).margin)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 30])
def test_a_confidence_interval_holds_as_often_as_it_says(size: int) -> None:
    rng = np.random.default_rng(size)
    found = [estimate(3 + rng.normal(size=size)) for _ in range(2000)]
    assert np.mean([abs(one.value - 3) <= one.margin for one in found]) == pytest.approx(0.95, abs=0.015)


def test_estimates_print_the_digits_that_mean_something() -> None:
    assert [str(Estimate(*pair)) for pair in ((64.127, 1.23), (1e4, 120.0), (-0.0004, 0.003), (0.5, float("nan")))] == [
        "64.1 ± 1.2",
        "10000 ± 120",
        "-0.0004 ± 0.0030",
        "0.5",
    ]


# ---------------------------------------------------------------- the law of the variance


@pytest.mark.slow
def test_the_law_of_the_variance(variance) -> None:
    plain = "mean 0, variance 1"
    assert variance.exponent(plain, "dot").value == pytest.approx(1.0, abs=0.03)
    assert variance.exponent(plain, "scaled_dot").value == pytest.approx(0.0, abs=0.03)
    assert all(check.holds for check in variance.checks())


@pytest.mark.slow
def test_with_means_it_grows_faster(variance) -> None:
    (at_64,) = (point for point in variance.of("mean 1, variance 1", "dot") if point.dim == 64)
    assert at_64.law == 192
    assert abs(at_64.measured.value - 192) <= 2 * at_64.measured.margin


def test_the_law_of_every_kind_is_the_variance_of_its_draws() -> None:
    rng = np.random.default_rng(0)
    for kind in (Coordinates("a", 0.5, 2.0, 3.0), Coordinates("b", key_variance=0.25)):
        query, key = kind.draw(rng, 40_000, 5)
        assert np.var((query * key).sum(-1)) == pytest.approx(kind.law(5), rel=0.05)
    query, key = Coordinates("c", alike=True).draw(rng, 40_000, 5)
    assert np.var((query * key).sum(-1)) == pytest.approx(25, rel=0.08)


def with_scores_swapped(found):
    """The scores that are not scaled, sold as scaled."""
    other = {"dot": "scaled_dot", "scaled_dot": "dot"}
    return dataclasses.replace(
        found, points=tuple(dataclasses.replace(point, score=other[point.score]) for point in found.points)
    )


@pytest.mark.slow
def test_a_law_that_is_broken_is_seen(variance) -> None:
    assert not all(check.holds for check in with_scores_swapped(variance).checks())


# ---------------------------------------------------------------- softmax and gradients


def test_sharpening_gives_the_numbers_of_the_mission() -> None:
    found = scaling.sharpening()
    for factor, expected in WEIGHTS.items():
        np.testing.assert_allclose(found.weights[found.factors.index(factor)], expected, atol=0.5e-3 * 1.0001, rtol=0)
        jacobian = found.jacobians[found.factors.index(factor)]
        np.testing.assert_allclose(jacobian, JACOBIANS[factor], atol=0.5e-5 * 1.0001, rtol=0)
    assert found.logits == LOGITS == (0.2, 0.4, 0.1, 0.8)
    assert WEIGHTS[8.0] == (0.008, 0.039, 0.004, 0.950) and JACOBIANS[8.0][3][3] == 0.04755
    assert len(found.checks()) == 4 and all(check.holds for check in found.checks())
    assert not scaling.sharpening([1.0, 2.0]).checks()  # of other logits nothing is known


def test_gradient_flow_is_that_of_the_definition() -> None:
    found = scaling.gradient_flow([2, 9], queries=5, keys=7, value_dim=3, seed=4)
    rng = np.random.default_rng(4)
    query, key = rng.standard_normal((5, 2)), rng.standard_normal((7, 2))
    value, incoming = rng.standard_normal((7, 3)), rng.standard_normal((5, 3))
    weights = ats.masked_softmax(query @ key.T)
    jacobians = ats.softmax_jacobian(weights)
    norms = np.linalg.norm(jacobians, axis=(1, 2))
    gradients = np.linalg.norm(np.einsum("qij,qj->qi", jacobians, incoming @ value.T), axis=-1)
    point = found.of("dot")[0]
    np.testing.assert_allclose(point.jacobian_norm, np.percentile(norms, (25, 50, 75)))
    np.testing.assert_allclose(point.gradient_norm, np.percentile(gradients, (25, 50, 75)))
    assert point.jacobian_trace == pytest.approx(np.trace(jacobians, axis1=1, axis2=2).mean())


def test_without_the_scale_gradients_vanish_and_with_it_they_do_not() -> None:
    found = quick("gradient_flow")
    assert all(check.holds for check in found.checks())
    assert not all(check.holds for check in with_scores_swapped(found).checks())


# ---------------------------------------------------------------- other scores, the worked answers


@pytest.mark.slow
def test_other_scores_grow_as_their_formulas_say() -> None:
    found = quick("score_growth")
    assert all(check.holds for check in found.checks())
    assert {point.score for point in found.points} >= {"dot", "scaled dot", "additive", "cosine", "bilinear"}
    assert all(point.largest <= point.bound for point in found.of("additive"))
    assert max(point.bound for point in found.of("additive")) < 10 < found.of("dot")[-1].largest


def test_the_sum_ignores_the_query_and_the_dot_product_does_not() -> None:
    found = scaling.sum_ignores_the_query()
    assert found.spread < 1e-12 and found.query_gradient < 1e-12
    assert found.dot_gradient > 1
    assert all(check.holds for check in found.checks())
    other = dataclasses.replace(found, weights=found.dot_weights, query_gradient=found.dot_gradient)
    assert not any(check.holds for check in other.checks())


def test_with_other_keys_dot_and_additive_disagree() -> None:
    found = scaling.other_keys(draws=16)
    assert found.noise[0] == 0 and found.differences[0] < 1e-12
    assert all(check.holds for check in found.checks())
    assert list(found.differences) == sorted(found.differences) and found.differences[-1] > 1


def test_a_score_for_different_lengths_is_two_matrix_products() -> None:
    found = scaling.different_lengths()
    assert found.difference < 1e-12 and found.by_products.shape == (5, 8)


def test_additive_attention_is_a_network_with_one_hidden_layer() -> None:
    found = scaling.additive_as_network()
    assert found.difference < 1e-12 and found.by_network.std() > 0.5


# ---------------------------------------------------------------- what findings share


@functools.cache
def quick(name: str):
    """Results of the quick lab; made once for the tests that need all of it.

    Of the variance without its two largest dimensions, which take three quarters of the time (the slow lab has them).
    """
    if name == "logit_variance":
        return logit_variance(DIMS[:-2], repeats=24)
    return next(experiment for experiment in scaling.EXPERIMENTS if experiment.name == name).run(True)


@pytest.mark.parametrize("experiment", scaling.EXPERIMENTS, ids=lambda one: one.name)
@pytest.mark.slow_rows("score_growth", "logit_variance")
def test_every_result_has_rows_a_sentence_checks_and_a_picture(experiment) -> None:
    found = quick(experiment.name)
    rows = found.to_rows()
    assert rows and all(row.keys() == rows[0].keys() for row in rows)
    json.dumps([{name: str(value) if value == float("inf") else value for name, value in row.items()} for row in rows])
    assert found.sentence().endswith(".") and found.checks() and experiment.question.endswith("?")
    figure = found.plot()
    figure.canvas.draw()
    assert lowest_panels_have_labels(figure)


def lowest_panels_have_labels(figure):
    places = [(axis, axis.get_subplotspec()) for axis in figure.axes]
    lowest = [axis for axis, place in places if place is not None and place.is_last_row()]
    return bool(lowest) and all(axis.get_xlabel() for axis in lowest)


def test_a_check_of_something_that_is_no_number_does_not_hold() -> None:
    assert not Check("", float("nan"), 1.0).holds and Check("", 1.0, 1.0).holds


ONE_SCORE = "score: expected one of dot, scaled_dot"
few_numbers = functools.partial(logit_variance, [1, 2], pairs=2, repeats=1)
few_keys = functools.partial(scaling.score_growth, [1, 2], keys=2, repeats=1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: logit_variance([8]), ["dims", "2 or more", "[8]"]),
        (lambda: logit_variance([0, 1]), ["dims", "[0, 1]"]),
        (lambda: logit_variance(4), ["dims", "2 or more", "got 4"]),
        (lambda: logit_variance([1, 2], pairs=0), ["pairs", "0"]),
        (lambda: logit_variance([1, 2], pairs=1), ["pairs", "2 or more", "got 1"]),
        (lambda: scaling.score_growth([1, 2], keys=1), ["keys", "2 or more", "got 1"]),
        (lambda: scaling.gradient_flow([1, 2.5]), ["dims", "2.5"]),
        (lambda: scaling.score_growth([1, 2], repeats=-1), ["repeats", "-1"]),
        (lambda: Plan((3,), seeds=1, steps=1, width=8), ["head_dims", "8", "3"]),
        (lambda: Plan((4,), seeds=0, steps=1), ["seeds", "0"]),
        (lambda: few_numbers().of("mean 0", "dot"), ["kind: expected one of mean 0, variance 1, mean 0, variances 4"]),
        (lambda: few_numbers().exponent("mean 0, variance 1", "dots"), [f"{ONE_SCORE}, got 'dots'"]),
        (lambda: scaling.gradient_flow([1, 2], queries=2).of("additive"), [f"{ONE_SCORE}, got 'additive'"]),
        (lambda: TrainingRuns(()).of("sum", 8), [f"{ONE_SCORE}, got 'sum'"]),
        (lambda: few_keys().exponent("dots"), ["score: expected one of dot, scaled dot"]),
    ],
)
def test_bad_sizes_and_names_are_named(call, words) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---------------------------------------------------------------- training runs


@pytest.mark.slow
def test_pairs_of_runs_differ_in_the_score_alone(trained) -> None:
    found, _ = trained
    assert len(found.runs) == 8
    for dim in (4, 8):
        for without, scaled in zip(found.of("dot", dim), found.of("scaled_dot", dim), strict=True):
            assert dataclasses.replace(without.settings, score="scaled_dot") == scaled.settings
            assert without.looks[0].loss == pytest.approx(scaled.looks[0].loss, rel=0.1)
    seeds = [run.looks[0].loss for run in found.of("dot", 4)]
    assert seeds[0] != seeds[1]


def test_models_start_alike_but_for_the_scale() -> None:
    models = []
    for score in ("dot", "scaled_dot"):
        torch.manual_seed(0)
        models.append(
            torch_language_model.LanguageModel(Settings(score, 4, 0, steps=1, width=8, layers=1, context=6), 11)
        )
        models[-1](torch.arange(12).reshape(2, 6) % 11, look=True)
    without, scaled = models
    for name, parameter in without.state_dict().items():
        assert torch.equal(parameter, scaled.state_dict()[name]), name
    variances = [model.blocks[0].stats.var_score for model in models]
    torch.testing.assert_close(variances[0], 4 * variances[1])


def test_queries_and_keys_start_with_variance_one() -> None:
    torch.manual_seed(0)
    block = torch_language_model.Block(Settings("dot", 64, 0, steps=1, width=128))
    model = torch_language_model.LanguageModel(Settings("dot", 64, 0, steps=1, width=128), 11)
    x = torch.nn.functional.layer_norm(torch.randn(500, 128), (128,))
    for layer in (model.blocks[0].attention.W_q, model.blocks[0].attention.W_k):
        assert float(layer(x).detach().var()) == pytest.approx(1.0, rel=0.1)
    assert block.heads == 2


@pytest.mark.slow
def test_what_is_seen_in_a_run(trained) -> None:
    found, _ = trained
    for run in found.runs:
        assert [look.step for look in run.looks] == list(range(6))
        assert run.looks[0].loss == pytest.approx(np.log(training.SYMBOLS), abs=1.0)
        assert all(0 <= look.entropy <= 1 and 0 <= look.saturated <= 1 for look in run.looks)
        assert np.isfinite(run.held_back_loss)
    steps, values = found.curves("dot", 4, "entropy")
    assert values.shape == (2, len(steps))
    losses = [[run.held_back_loss for run in found.of(score, 4)] for score in ("dot", "scaled_dot")]
    assert found.gap(4).value == pytest.approx(np.mean(losses[0]) - np.mean(losses[1]))
    figure = found.plot()
    figure.canvas.draw()
    assert lowest_panels_have_labels(figure)


def test_statistics_are_those_of_the_definition() -> None:
    settings = Settings("dot", 4, 0, steps=1, width=8, layers=1, context=6, batch=3)
    torch.manual_seed(0)
    model = torch_language_model.LanguageModel(settings, 11)
    seen = []
    block = model.blocks[0]
    block.attention.W_q.register_forward_hook(lambda _, __, out: seen.append(out))
    block.attention.W_k.register_forward_hook(lambda _, __, out: seen.append(out))
    model(torch.randint(11, (3, 6)), look=True)
    query, key = (x.detach().double().unflatten(-1, (2, 4)).transpose(1, 2) for x in seen[:2])
    scores = query @ key.mT
    variances, entropies = [], []
    for row in range(1, 6):
        one = scores[..., row, : row + 1]
        variances.append(one.var(-1, correction=0))
        weights = one.softmax(-1)
        entropies.append(-(weights * weights.log()).sum(-1) / np.log(row + 1))
    look = torch_language_model._look(0, 0.0, model)
    assert look.logit_variance == pytest.approx(float(torch.stack(variances).mean()), rel=1e-5)
    assert look.entropy == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-5)


def test_a_run_leaves_the_random_stream_alone_and_repeats() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plan = Plan((4,), seeds=1, steps=2, width=8, batch=2, context=8)
    one, two = (training_runs(plan) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert [run.held_back_loss for run in one.runs] == [run.held_back_loss for run in two.runs]


@pytest.mark.slow
def test_finished_runs_are_read_and_others_made(trained, monkeypatch) -> None:
    found, folder = trained
    files = sorted(folder.iterdir())
    assert len(files) == 8
    files[0].unlink()
    files[1].write_text("{ half a file")
    changed = json.loads(files[2].read_text())
    changed["settings"]["batch"] = 99
    files[2].write_text(json.dumps(changed))
    received = []
    again = training_runs(SMALL, folder, tell=lambda settings, step: received.append((settings, step)))
    assert [run.held_back_loss for run in again.runs] == [run.held_back_loss for run in found.runs]
    made = {settings for settings, step in received if step < settings.steps}
    assert {f"{settings.name}.json" for settings in made} == {path.name for path in files[:3]}
    assert sorted(folder.iterdir()) == files
    monkeypatch.setattr(training, "_MODULES", training._MODULES[1:])  # another text: no run counts
    assert runs.read(next(SMALL.settings()), training.digest(training.standard_library()), folder) is None


def test_an_interrupted_run_leaves_no_file(tmp_path) -> None:
    def stop(settings: Settings, step: int) -> None:
        if settings.score == "scaled_dot" and step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training_runs(SMALL, tmp_path, tell=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["dot-d4-seed0-6.json"]


def test_a_gap_that_is_missing_is_seen(trained) -> None:
    found, _ = trained
    same = TrainingRuns(tuple(dataclasses.replace(run, held_back_loss=2.0) for run in found.runs))
    assert not same.checks()[0].holds


def test_text_is_real_and_encoded_whole() -> None:
    found = training.standard_library()
    assert len(found) > 100_000 and "def " in found and "import " in found
    numbers = training.encode(found[:500] + "é")
    assert numbers.min() >= 0 and numbers.max() == training.SYMBOLS - 1
    assert "".join(training.ALPHABET[n] for n in training.encode("a b\n~")) == "a b\n~"


# ---------------------------------------------------------------- as a page


@pytest.mark.slow
def test_a_page_holds_what_was_found(tmp_path) -> None:
    found = [("sharpening", quick("sharpening")), ("sum_score", quick("sum_score"))]
    written = scaling.report_page(found, tmp_path / "why.html").read_text("utf-8")
    for _, one in found:
        assert html.escape(one.sentence()) in written
    assert "Is the sum of q + k a score?" in written and "0.008 0.039 0.004 0.950" in written
    alone = found[0][1].to_html(tmp_path / "one.html", title="A & B").read_text("utf-8")
    assert '<h2 id="part-1">A &amp; B</h2>' in alone and "<nav>" not in alone
    assert alone.count("<tr>") == 1 + len(found[0][1].to_rows())


def test_a_page_says_what_its_pictures_show() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    figure.suptitle("Two lines")
    left.set(title="first", xlabel="d", ylabel="variance")
    right.set(title="second\nhalf", xlabel="d")
    figure.colorbar(right.imshow([[0, 1]]), ax=right)
    assert page.describe_figure(figure) == "Two lines. first: variance against d; second half: d."


def test_a_page_is_no_markup_and_no_half_file(tmp_path) -> None:
    row = {"name": "<b>", "value": 0.25}
    out = page.write_page(tmp_path / "a.html", "<i>", "facts", [page.Section("<u>", ["<s>"], [row])])
    written = out.read_text("utf-8")
    assert not re.search("<(b|i|u|s)>", written) and "&lt;b&gt;" in written and ">0.250<" in written
    with pytest.raises(FileNotFoundError):
        page.write_page(tmp_path / "none" / "a.html", "t", "f", [])
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_a_gap_of_one_pair_has_no_margin() -> None:
    found = training_runs(Plan((4,), seeds=1, steps=2, width=8, batch=2, context=8))
    assert found.sentence().endswith("One pair of runs for each d: no margin.")
    assert "±" not in found.sentence() and "±" not in found.summary()[0]["gap"]


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_quick_lab_shows_the_law_and_the_gap(tmp_path, capsys) -> None:
    assert main(["lab", "--out", str(tmp_path / "lab")]) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "lab" / "results.json").read_text("utf-8"))
    exponents = results["logit_variance"]["exponents"]["mean 0, variance 1"]
    assert exponents["dot"][0] == pytest.approx(1.0, abs=0.03)
    assert exponents["scaled_dot"][0] == pytest.approx(0.0, abs=0.03)
    assert results["training_runs"]["gap"]["128"][0] > 0.05
    assert all(check["holds"] for check in results["checks"]) and len(results["pictures"]) == 9
    assert "d = 128" in printed and "checks hold" in printed and "\x1b" not in printed
    assert len(list((tmp_path / "lab" / "runs").iterdir())) == 4


@pytest.mark.slow
def test_the_command_with_a_small_plan(tmp_path, capsys, monkeypatch) -> None:
    made = [one._replace(run=lambda _, name=one.name: quick(name)) for one in scaling.EXPERIMENTS]
    for one in made:
        one.run(True)
    monkeypatch.setattr(scaling, "EXPERIMENTS", tuple(made))
    monkeypatch.setattr(scaling, "QUICK", SMALL)
    monkeypatch.setattr("attnscore.diagnostics.lab.training._LEAST_GAP", -10.0)
    arguments = ["lab", "--out", str(tmp_path / "lab")]
    assert main(arguments) in (0, 1)  # eight features may start far from their law
    first = capsys.readouterr().out
    results = json.loads((tmp_path / "lab" / "results.json").read_text("utf-8"))
    assert set(results) >= {"logit_variance", "sharpening", "training_runs", "checks", "pictures", "seconds", "quick"}
    assert len(results["training_runs"]["curves"]) == 8
    assert {path.name for path in (tmp_path / "lab").iterdir()} == {
        *results["pictures"],
        "report.html",
        "results.json",
        "runs",
    }
    written = (tmp_path / "lab" / "report.html").read_text("utf-8")
    assert "<script" not in written and written.count("<h2") == len(made) + 2
    assert written.count('src="data:image/svg+xml,') == len(made) + 1
    assert "[9/9]" in first and "[8/8] scaled_dot, d = 8, seed 1" in first


def test_the_command_and_the_function_run_the_same_lab() -> None:
    defaults = {inspect.signature(function).parameters["quick"].default for function in (lab, scaling.scaling_lab)}
    assert defaults == {True}


def test_lab_refuses_a_folder_that_cannot_be(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["lab", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
