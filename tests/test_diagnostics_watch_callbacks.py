"""Callbacks of training loops, and the logs that they write to."""

from __future__ import annotations

import csv
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attnscore.diagnostics import callbacks, watch
from attnscore.diagnostics.callbacks import HeadLog, TrainerCallback
from attnscore.diagnostics.callbacks.watching import stop_watches_at_the_end
from attnscore.diagnostics.watching import rebinding
from attnscore.diagnostics.watching.records import NUMBERS
from attnscore.errors import ArgumentError, FrameworkError

pytestmark = pytest.mark.usefixtures("torch_seed", "few_modules")
FEW = {"failing_heads", "worst/max_logit", "worst/entropy", "worst/saturated_rows", "worst/nan_rows"}


@pytest.fixture(autouse=True)
def restored():
    yield
    assert not rebinding.ACTIVE


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def run(model: nn.Module, steps: int, on_step: Any) -> Any:
    with watch(model, on_step=on_step) as seen:
        on_step.seen = seen
        for step in range(steps):
            model(torch.randn(2, 5, 8) * (step + 1))
    return seen


class Recorder:
    """A writer with one of the methods of the libraries, which keeps what it is called with."""

    def __init__(self, method: str) -> None:
        self.calls: list[Any] = []
        setattr(self, method, lambda *a, **k: self.calls.append((a, k)))


def test_each_log_is_written_as_its_library_wants_it() -> None:
    board, mlflow, wandb = (Recorder(name) for name in ("add_scalar", "log_metrics", "log"))
    given: list[Any] = []
    seen = run(Model(), 2, HeadLog(board, mlflow, wandb, lambda numbers, step: given.append((step, numbers))))
    assert [step for step, _ in given] == [0, 1] and set(given[0][1]) == {f"attention/{name}" for name in FEW}
    rows = seen.last()
    assert given[1][1]["attention/worst/max_logit"] == max(row["max_logit"] for row in rows)
    assert given[1][1]["attention/worst/entropy"] == min(row["entropy"] for row in rows)
    assert given[1][1]["attention/failing_heads"] == len(seen.failing())
    assert [call[0] for call in board.calls[5:]] == [(name, value, 1) for name, value in given[1][1].items()]
    assert mlflow.calls[1] == ((given[1][1],), {"step": 1})
    assert wandb.calls[1] == (({**given[1][1], "attention/step": 1},), {})


def test_a_number_for_each_head_and_statistic() -> None:
    given: list[dict[str, float]] = []
    mlflow = Recorder("log_metrics")
    model = Model()
    log = HeadLog(lambda numbers, step: given.append(numbers), mlflow, per_head=True)
    with watch(model.attention, on_step=log) as seen:
        model(torch.randn(2, 5, 8))
    finite = [name for name in NUMBERS if name != "padding"]  # NaN where padding is unknown
    expected = {f"attention/(model)/{head}/{name}" for head in range(2) for name in finite}
    assert expected == {name for name in given[0] if "worst" not in name}
    assert given[0]["attention/(model)/1/entropy"] == seen.rows()[1]["entropy"]
    assert "attention/_model_/1/entropy" in mlflow.calls[0][0][0]


@pytest.mark.parametrize("per_head", [False, True])
def test_a_csv_file(per_head: bool, tmp_path: Path) -> None:
    path = tmp_path / "heads.csv"
    path.write_text("old\n")
    log = HeadLog(csv=path, per_head=per_head)
    seen = run(Model(), 3, log)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["step"] for line in lines] == [str(step) for step in range(3) for _ in range(2 if per_head else 1)]
    if per_head:
        assert float(lines[5]["entropy"]) == seen.last()[1]["entropy"] and lines[5]["layer"] == "attention"
        assert set(lines[0]) == {"step", "layer", "head", *NUMBERS}
    else:
        assert set(lines[0]) == {"step", *FEW}
        assert float(lines[2]["worst/max_logit"]) == max(row["max_logit"] for row in seen.last())


def test_numbers_that_are_not_finite_are_left_out_and_counted() -> None:
    given: list[dict[str, float]] = []
    model = Model()
    with watch(model, on_step=HeadLog(lambda numbers, step: given.append(numbers))):
        model(torch.full((1, 3, 8), torch.nan))
    assert given == [{"attention/worst/nan_rows": 3.0}]


def test_another_writer_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"writers.*add_scalar.*int"):
        HeadLog(5)


def test_names() -> None:
    assert set(callbacks.__all__) == {"HeadLog", "KerasCallback", "LightningCallback", "TrainerCallback"}
    assert "every : int" in (TrainerCallback.__doc__ or "")
    with pytest.raises(AttributeError, match="nothing"):
        _ = callbacks.nothing
    with pytest.raises(ArgumentError, match="seen"):
        _ = TrainerCallback().seen


# ---------------------------------------------------------------- Hugging Face


class Losses(TrainerCallback):
    """Notes the losses that it passes on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.losses: list[float] = []

    def _take_loss(self, loss: Any) -> None:
        super()._take_loss(loss)
        self.losses += [] if loss is None else [loss]


def test_the_events_of_a_trainer() -> None:
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    model, given = Model(), []
    callback = Losses(lambda numbers, step: given.append(step), every=2, stop=True)
    handler = CallbackHandler([callback], model, None, None, None)
    args, state, control = types.SimpleNamespace(), TrainerState(), TrainerControl()
    control = handler.on_train_begin(args, state, control)
    for step in range(4):
        model(torch.randn(2, 5, 8))
        control.should_evaluate = step == 1
        control = handler.on_step_end(args, state, control)
        if step == 1:
            model(torch.randn(2, 5, 8))
            control = handler.on_evaluate(args, state, control, {})
        assert not control.should_training_stop
    control = handler.on_log(args, state, control, {"loss": 0.5})
    control = handler.on_log(args, state, control, {"eval_loss": 0.5})
    with torch.no_grad():
        model.attention.in_proj_weight.mul_(1000)
    for _ in range(3):  # two sampled steps make a verdict
        assert not control.should_training_stop
        model(torch.randn(2, 5, 8))
        control = handler.on_step_end(args, state, control)
    assert control.should_training_stop
    handler.on_train_end(args, state, control)
    model(torch.randn(2, 5, 8))
    assert callback.seen.steps == 7 and given == [0, 2, 4, 6] and callback.losses == [0.5] and callback.seen.failing()


def test_an_exception_in_a_training_stops_its_watch() -> None:
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    model, callback = Model(), TrainerCallback(every=1)

    class Loop:
        """A training by ``Trainer`` itself needs another package."""

        def train(self) -> None:
            handler = CallbackHandler([callback], model, None, None, None)
            handler.on_train_begin(types.SimpleNamespace(), TrainerState(), TrainerControl())
            model(torch.randn(2, 5, 8))
            raise KeyboardInterrupt

    stop_watches_at_the_end(Loop, "train")
    with pytest.raises(KeyboardInterrupt):
        Loop().train()
    model(torch.randn(2, 5, 8))
    assert callback.seen.steps == 1 and not rebinding.ACTIVE
    assert Trainer.train.__code__ is Loop.train.__code__, "wrapped too"


@pytest.mark.slow
def test_a_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    data = [{"input_ids": torch.arange(6), "labels": torch.tensor(i % 2)} for i in range(8)]
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, num_train_epochs=2, eval_strategy="epoch",
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    callback = Losses(csv=tmp_path / "heads.csv", every=2)
    model = BertForSequenceClassification(config)
    Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=[callback]).train()
    assert callback.seen.steps == 8 and callback.seen.sampled == 4 and len(callback.losses) == 8
    assert len(callback.seen.rows()) == 4 and len((tmp_path / "heads.csv").read_text().splitlines()) == 5


# ---------------------------------------------------------------- Lightning


@pytest.mark.skipif(any(map(find_spec, ("lightning", "pytorch_lightning"))), reason="Lightning is installed")
def test_without_lightning_its_callback_says_what_is_missing() -> None:
    with pytest.raises(FrameworkError, match="pip install lightning"):
        callbacks.LightningCallback()


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from attnscore.diagnostics.callbacks import LightningCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.model(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    losses: list[float] = []
    given: list[int] = []
    callback = LightningCallback(lambda numbers, step: given.append(step), every=2)
    callback._take_loss = lambda loss: losses.append(float(loss))
    data = torch.utils.data.DataLoader(torch.randn(8, 5, 8), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        callbacks=[callback], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(), data, data)
    assert callback.seen.steps == 8 and given == [0, 2, 4, 6] and len(losses) == 8
    assert list(callback.seen.layers) == ["model.attention"]
