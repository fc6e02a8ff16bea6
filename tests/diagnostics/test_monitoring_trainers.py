"""The callbacks with the real trainers: what they write, where they go on, and that training has the same bits."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from monitoring_cases import Noisy, pair, tokens

import hessiankit as hk
from hessiankit.diagnostics.monitoring import MonitorLog

pytestmark = pytest.mark.slow

TYPES = {"Emb", "QK", "VO", "FFN", "Norm"}
OPTIONS = {
    "every": 2,
    "draws": 2,
    "eigenvalue": True,
    "eigenvalue_products": 20,
    "depth": ("variance", "drop"),
    "optimizer": "trainer",
}


class Tokens(torch.utils.data.Dataset):
    def __init__(self, rows: int = 16) -> None:
        self.rows = tokens(0, rows, 8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[k], "labels": self.rows[k]}


@pytest.fixture(scope="module")
def transformers():
    found = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return found


def gpt2(transformers):
    torch.manual_seed(0)
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=13, bos_token_id=0, eos_token_id=1, **sizes))


def trained(transformers, folder: Path, *callbacks, steps: int = 5, resume: str | None = None, **options):
    """A run of the real Trainer, with dropout; its trainer."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, save_steps=3,
        report_to=[], disable_tqdm=True, use_cpu=True, seed=3, learning_rate=1e-2, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        trainer = transformers.Trainer(gpt2(transformers), arguments, train_dataset=Tokens(), callbacks=list(callbacks))
        for callback in callbacks:
            callback.trainer = trainer if callback.trainer == "this" else None
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def hf_callback(path: Path, **options):
    from hessiankit.diagnostics.monitoring.hugging_face import SharpnessCallback

    inputs = tokens(7, 2, 8)
    return SharpnessCallback({"input_ids": inputs, "labels": inputs}, path, **{**OPTIONS, **options})


def test_hugging_face_trains_to_the_same_bits(transformers, tmp_path, capsys):
    plain = trained(transformers, tmp_path / "a")
    callback = hf_callback(tmp_path / "run.jsonl", trainer="this")
    assert isinstance(callback, transformers.TrainerCallback)
    watched = trained(transformers, tmp_path / "b", callback)
    for (name, one), other in zip(plain.model.state_dict().items(), watched.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    log = MonitorLog.read(tmp_path / "run.jsonl")
    assert list(log.steps) == [0, 2, 4, 5]
    assert set(log.sharpness) == TYPES
    assert (log.series("eigenvalue", "value") > 0).all()
    assert log.header["options"]["critical"]["optimizer"] == "AdamW"
    assert (log.series("preconditioned", "value")[1:3] > 0).all()  # from the first update on, until the rate is 0
    assert log.series("depth", "stream", "variance").shape == (4, 3)
    own = [entry for entry in watched.state.log_history if "sharpness/Norm" in entry]
    assert [entry["step"] for entry in own] == [0, 2, 4, 5]
    assert own[1]["sharpness/Norm"] == log.sharpness["Norm"].value[1]
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (plain, watched)]
    assert len(losses[0]) == 5  # none of the trainer's own entries is lost
    assert losses[0] == losses[1]


def test_hugging_face_goes_on_from_a_checkpoint(transformers, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    trained(transformers, tmp_path, hf_callback(path, warm_starts=False), steps=6)
    whole = MonitorLog.read(path)
    trained(transformers, tmp_path, hf_callback(path, warm_starts=False), steps=6, resume=str(tmp_path / "checkpoint-3"))
    again = MonitorLog.read(path)
    assert whole.steps.tolist() == again.steps.tolist() == [0, 2, 4, 6]
    for one, other in zip(whole.records, again.records, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert len(path.read_text().splitlines()) == 1 + 4 + 1 + 2  # a header, the first run, where the second one goes on, its steps


def test_hugging_face_measures_in_process_zero_only(transformers, tmp_path):
    callback = hf_callback(tmp_path / "run.jsonl")
    state = transformers.TrainerState(is_world_process_zero=False)
    callback.on_train_begin(None, state, transformers.TrainerControl(), model=gpt2(transformers))
    callback.on_step_end(None, state, transformers.TrainerControl())
    assert not (tmp_path / "run.jsonl").exists()


@pytest.fixture(scope="module")
def lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lightning")


def lightning_run(lightning, folder: Path, *callbacks, steps: int = 5, resume: Path | None = None):
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = Noisy()

        def training_step(self, batch, batch_idx):
            rows = batch["input_ids"]
            return F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        str(folder), filename="{step}", every_n_train_steps=3, save_top_k=-1
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        warnings.filterwarnings("ignore", module="torch.*")
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", devices=1, accumulate_grad_batches=2, logger=False, callbacks=[*callbacks, checkpoints],
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        )  # fmt: skip
        torch.manual_seed(4)
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(Tokens(), batch_size=2, shuffle=True), ckpt_path=resume)
    return trainer, module


def lightning_callback(path: Path, **options):
    from hessiankit.diagnostics.monitoring.lightning import SharpnessCallback

    return SharpnessCallback(pair(rows=2), path, **{**OPTIONS, "model": "model", **options})


def test_lightning_trains_to_the_same_bits(lightning, tmp_path):
    _, plain = lightning_run(lightning, tmp_path / "a")
    callback = lightning_callback(tmp_path / "run.jsonl")
    assert isinstance(callback, lightning.Callback)
    trainer, watched = lightning_run(lightning, tmp_path / "b", callback)
    for (name, one), other in zip(plain.state_dict().items(), watched.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    log = MonitorLog.read(tmp_path / "run.jsonl")
    assert list(log.steps) == [0, 2, 4, 5]
    assert set(log.sharpness) >= TYPES
    assert float(trainer.callback_metrics["sharpness/Norm"]) == pytest.approx(log.sharpness["Norm"].value[2], rel=1e-6)


def test_lightning_goes_on_from_a_checkpoint(lightning, tmp_path):
    lightning_run(lightning, tmp_path, lightning_callback(tmp_path / "run.jsonl"), steps=4)
    assert MonitorLog.read(tmp_path / "run.jsonl").steps.tolist() == [0, 2, 4]
    choose = lightning_callback(tmp_path / "run.jsonl", model=lambda module: module.model)
    lightning_run(lightning, tmp_path, choose, steps=6, resume=tmp_path / "step=3.ckpt")
    assert MonitorLog.read(tmp_path / "run.jsonl").steps.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("name", ["hugging_face", "lightning"])
def test_a_missing_package_is_named(name, monkeypatch):
    module = importlib.import_module(f"hessiankit.diagnostics.monitoring.{name}")
    monkeypatch.delitem(vars(module), "SharpnessCallback", raising=False)
    for package in ("transformers", "lightning"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        hk.InputError, match=r"needs the package \w+ \(.*\); install it with pip install 'hessiankit\[training\]'"
    ):
        _ = module.SharpnessCallback
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = module.Other
