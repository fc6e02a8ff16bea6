"""The callbacks of docs/monitoring.md with the real trainers: what they write, where they go on, and that training has the same bits."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from monitoring_cases import Noisy, pair, tokens

from hessiankit.training.monitoring import Monitor, MonitorLog

pytestmark = pytest.mark.slow

TYPES = {"Emb", "QK", "VO", "FFN", "Norm"}
PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
HUGGING_FACE, LIGHTNING = (
    next(block for block in re.findall(r"```py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if base in block)
    for base in ("transformers.TrainerCallback", "lightning.Callback")
)
"""The blocks of the page as they stand, but with a measurement every two steps."""


def run_block(block: str, names: dict[str, Any]) -> Any:
    """Run a block of the page; the trainer that it makes."""
    exec(compile(block.replace("every=100", "every=2"), PAGE.name, "exec"), names)
    return names["trainer"]


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


def trained(transformers, folder: Path, *, watched: bool = True, steps: int = 5, resume: str | None = None):
    """A run of the real Trainer, with dropout, as the page shows; its trainer."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, save_steps=3,
        report_to=[], disable_tqdm=True, use_cpu=True, seed=3, learning_rate=1e-2,
    )  # fmt: skip
    inputs = tokens(7, 2, 8)
    names = {"transformers": transformers, "model": gpt2(transformers), "arguments": arguments, "dataset": Tokens()}
    names |= {"batch": {"input_ids": inputs, "labels": inputs}, "Monitor": Monitor}
    block = (
        HUGGING_FACE if watched else "trainer = transformers.Trainer(model, arguments, train_dataset=dataset)\ntrainer.train()"
    )
    if resume:
        block = block.replace("trainer.train()", f"trainer.train(resume_from_checkpoint={resume!r})")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        return run_block(block, names)


def test_hugging_face_trains_to_the_same_bits(transformers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plain, watched = (trained(transformers, tmp_path / str(watched), watched=watched) for watched in (False, True))
    for (name, one), other in zip(plain.model.state_dict().items(), watched.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    log = MonitorLog.read("run.jsonl")
    assert list(log.steps) == [0, 2, 4, 5]
    assert set(log.sharpness) == TYPES
    assert log.header["options"]["optimizer"] == "AdamW"
    assert (log.series("preconditioned", "value")[1:3] > 0).all()  # from the first update on, until the rate is 0
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (plain, watched)]
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]


def test_hugging_face_goes_on_from_a_checkpoint(transformers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained(transformers, tmp_path, steps=6)
    whole = MonitorLog.read("run.jsonl")
    trained(transformers, tmp_path, steps=6, resume=str(tmp_path / "checkpoint-3"))
    again = MonitorLog.read("run.jsonl")
    assert whole.steps.tolist() == again.steps.tolist() == [0, 2, 4, 6]
    for one, other in zip(whole.records, again.records, strict=True):
        for section in ("loss", "norms", "sharpness"):
            assert one[section] == other[section]
    assert (
        len(Path("run.jsonl").read_text().splitlines()) == 1 + 4 + 1 + 2
    )  # header, first run, where the second goes on, its steps


@pytest.fixture(scope="module")
def lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lightning")


def lightning_run(lightning, folder: Path, *, watched: bool = True, steps: int = 5, resume: Path | None = None):
    """A run of Lightning's Trainer as the page shows; its module."""

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
    options = {
        "accelerator": "cpu", "devices": 1, "accumulate_grad_batches": 2, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": str(folder),
    }  # fmt: skip
    block = LIGHTNING.replace("callbacks=[Follow()]", f"callbacks=[{'Follow(), ' * watched}checkpoints], **options")
    block = block.replace("fit(module, loader)", "fit(module, loader, ckpt_path=resume)")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        warnings.filterwarnings("ignore", module="torch.*")
        torch.manual_seed(4)
        inputs, labels = pair(rows=2)
        names = {"lightning": lightning, "module": Module(), "Monitor": Monitor, "inputs": inputs, "labels": labels}
        names |= {"loader": torch.utils.data.DataLoader(Tokens(), batch_size=2, shuffle=True), "checkpoints": checkpoints}
        run_block(block, {**names, "options": options, "max_steps": steps, "resume": resume})
    return names["module"]


def test_lightning_trains_to_the_same_bits(lightning, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, watched = (lightning_run(lightning, tmp_path / str(watched), watched=watched) for watched in (False, True))
    for (name, one), other in zip(plain.state_dict().items(), watched.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    log = MonitorLog.read("run.jsonl")
    assert list(log.steps) == [0, 2, 4]
    assert set(log.sharpness) >= TYPES


def test_lightning_goes_on_from_a_checkpoint(lightning, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lightning_run(lightning, tmp_path, steps=4)
    assert MonitorLog.read("run.jsonl").steps.tolist() == [0, 2, 4]
    lightning_run(lightning, tmp_path, steps=6, resume=tmp_path / "step=3.ckpt")
    assert MonitorLog.read("run.jsonl").steps.tolist() == [0, 2, 4, 6]
