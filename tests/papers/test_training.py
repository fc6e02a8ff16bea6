"""Training: the update is AdamW's, the digits depend on the seed alone, and stopping loses nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hessiankit.blocks import VisionTransformer
from hessiankit.support.errors import InputError
from papers.experiments.images import load_images, patchify
from papers.experiments.training import TrainingResult, accuracy, train

INPUTS = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = (INPUTS[:, 0] > 0.3).long() + (INPUTS[:, 1] > 0).long()


def classifier(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3)).double()


def digits_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def run(model: nn.Module, **options: object) -> TrainingResult:
    settings: dict[str, object] = {"batch_size": 12, "progress": False, "lr": 0.02, **options}
    return train(model, INPUTS, LABELS, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_steps_are_adamw_on_seeded_epochs(loss: str) -> None:
    model, reference = classifier(), classifier()
    result = run(model, loss=loss, steps=7, weight_decay=0.1, seed=5)
    generator, losses = torch.Generator().manual_seed(5), []
    order = torch.cat([torch.randperm(50, generator=generator)[:48] for _ in range(2)])
    parameters = list(reference.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for step in range(1, 8):
        rows = order[12 * (step - 1) : 12 * step]
        log_p = reference(INPUTS[rows])
        if loss == "cross_entropy":
            value = -log_p.log_softmax(-1)[torch.arange(12), LABELS[rows]].sum() / 12
        else:
            value = (log_p - torch.eye(3, dtype=torch.float64)[LABELS[rows]]).square().sum() / (12 * 3)
        losses.append(value.item())
        with torch.no_grad():
            for p, g, (m, v) in zip(parameters, torch.autograd.grad(value, parameters), moments, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g**2)
                p.mul_(1 - 0.02 * 0.1)
                p.sub_(0.02 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
    assert torch.allclose(digits_of(model), digits_of(reference), rtol=0, atol=1e-13)
    assert result.losses == pytest.approx(losses, abs=1e-13)
    assert (result.steps, result.interrupted) == (7, False)


def test_the_seed_decides_and_the_callers_random_state_is_left_alone() -> None:
    models = [classifier(0.3) for _ in range(3)]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    first = run(models[0], steps=20, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(10)
    assert run(models[1], steps=20, seed=0).losses == first.losses
    assert torch.equal(digits_of(models[0]), digits_of(models[1]))
    assert run(models[2], steps=20, seed=1).losses != first.losses


def test_accuracies_and_modes() -> None:
    model = classifier()
    model[2].eval()
    result = run(model, steps=300, validation=(INPUTS[:10], LABELS[:10]))
    assert result.train_accuracy == (model(INPUTS).argmax(-1) == LABELS).double().mean().item()
    assert result.validation_accuracy == (model(INPUTS[:10]).argmax(-1) == LABELS[:10]).double().mean().item()
    assert result.train_accuracy is not None
    assert result.train_accuracy > 0.9
    assert [module.training for module in model] == [True, True, False, True]
    assert "training accuracy" in str(result)
    assert all(p.grad is None for p in model.parameters())
    assert accuracy(model, INPUTS, INPUTS) is None


def test_floating_targets_and_token_labels() -> None:
    model = nn.Linear(3, 2).double()
    true = INPUTS @ torch.tensor([[1.0, 0], [2, -1], [0, 3]], dtype=torch.float64)
    result = train(model, INPUTS, true, loss="mse", steps=800, lr=0.05, progress=False)
    assert result.losses[-1] < 1e-6
    assert result.train_accuracy is None
    tokens = INPUTS[:48].reshape(12, 4, 3)
    by_token = train(classifier(), tokens, LABELS[:48].reshape(12, 4), steps=2, progress=False)
    flat = train(classifier(), INPUTS[:48], LABELS[:48], steps=2, progress=False)
    assert by_token.losses == pytest.approx(flat.losses, abs=1e-13)


@pytest.mark.parametrize("cut", [1, 130, 150])
def test_going_on_from_a_checkpoint_gives_the_digits_of_an_uninterrupted_run(tmp_path: Path, cut: int) -> None:
    whole, cut_model, taken_up = classifier(0.2), classifier(0.2), classifier(0.2)
    expected = run(whole, steps=150)
    run(cut_model, steps=cut, checkpoint=tmp_path / "new" / "run.pt")
    result = run(taken_up, steps=150, checkpoint=tmp_path / "new" / "run.pt")
    assert result.losses == expected.losses
    assert torch.equal(digits_of(taken_up), digits_of(whole))
    assert os.listdir(tmp_path / "new") == ["run.pt"]


def test_a_crash_goes_on_from_the_last_hundred(tmp_path: Path) -> None:
    def crash(step: int, loss: float) -> None:
        if step == 130:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(classifier(), steps=150, checkpoint=tmp_path / "run.pt", callback=crash)
    steps: list[int] = []
    result = run(classifier(), steps=150, checkpoint=tmp_path / "run.pt", callback=lambda step, loss: steps.append(step))
    assert steps[0] == 101
    assert result.losses == run(classifier(), steps=150).losses


def test_ctrl_c_returns_what_was_done_and_the_run_goes_on(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def press(step: int, loss: float) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    model, whole = classifier(), classifier()
    result = run(model, steps=20, callback=press, checkpoint=tmp_path / "run.pt")
    assert (result.interrupted, result.steps, len(result.losses)) == (True, 5, 5)
    assert str(result).endswith("(interrupted)")
    assert signal.getsignal(signal.SIGINT) is handler
    expected = run(whole, steps=5)
    assert result.losses == expected.losses
    assert torch.equal(digits_of(model), digits_of(whole))
    resumed = run(classifier(), steps=20, checkpoint=tmp_path / "run.pt")
    assert resumed.losses == run(classifier(), steps=20).losses
    assert not resumed.interrupted


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    def press(step: int, loss: float) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(classifier(), steps=20, callback=press)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run(classifier(), steps=4, checkpoint=path)
    with pytest.raises(InputError, match=r"of another run: lr 0\.02 there, 0\.01 here"):
        run(classifier(), steps=4, checkpoint=path, lr=0.01)
    with pytest.raises(InputError, match="at step 4, past steps=3"):
        run(classifier(), steps=3, checkpoint=path)
    path.write_bytes(b"PK garbage")
    with pytest.raises(InputError, match="is not a checkpoint"):
        run(classifier(), steps=4, checkpoint=path)


def test_errors_name_the_argument() -> None:
    with pytest.raises(InputError, match="loss='l1' is not known"):
        run(classifier(), loss="l1")
    with pytest.raises(InputError, match="50 inputs but 49 targets"):
        train(classifier(), INPUTS, LABELS[:-1])
    with pytest.raises(InputError, match=r"inputs are torch\.float32 on cpu, the model is torch\.float64"):
        train(classifier(), INPUTS.float(), LABELS)
    with pytest.raises(InputError, match="needs class labels"):
        train(classifier(), INPUTS, INPUTS)
    with pytest.raises(InputError, match=r"outputs \(50, 3\) do not fit targets \(50, 2\)"):
        train(classifier(), INPUTS, INPUTS[:, :2], loss="mse")
    with pytest.raises(InputError, match=r"logits \(50, 3\) do not fit labels \(50, 1\)"):
        train(classifier(), INPUTS, LABELS[:, None])
    with pytest.raises(InputError, match="steps=-1"):
        run(classifier(), steps=-1)
    with pytest.raises(InputError, match="no parameters"):
        train(nn.Tanh(), INPUTS, LABELS)
    with pytest.raises(InputError, match="the loss became nan at step 1; lower the learning rate"):
        train(classifier(), INPUTS * float("nan"), LABELS)
    with pytest.raises(InputError, match="2 validation inputs but 3"):
        run(classifier(), validation=(INPUTS[:2], LABELS[:3]))


def test_the_bar_is_for_terminals_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run(classifier(), steps=2, progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    run(classifier(), steps=2, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


def test_a_vision_transformer_learns_the_digits() -> None:
    data = load_images("digits")
    patches = patchify(data.images, 4)
    torch.manual_seed(0)
    model = VisionTransformer(16, 4, 10, d_model=8, d_ff=16, bias=True)
    result = train(model, patches, data.labels, steps=250, progress=False)
    assert result.train_accuracy is not None
    assert result.train_accuracy > 0.6
