"""A monitor measures what it says, changes no bit of the training that it follows, and goes on where a run was interrupted."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from curvature_reference import Formula
from monitoring_cases import Noisy, full_disk, pair, tokens, train
from torch import nn

import hessiankit as hk
from hessiankit.training.depth import depth_diagnostics
from hessiankit.training.monitoring import Monitor, MonitorLog
from hessiankit.training.monitoring.measurements import SEED_STRIDE
from hessiankit.training.monitoring.monitor import bare
from hessiankit.training.sharpness import sharpness

ALL = {"norms": {}, "sharpness": {"draws": 2}, "eigenvalue": {"warm_start": False}, "depth": {}}
QUICK = {"every": 2, "what": ALL}


def small(seed: int = 0, layers: int = 2) -> Noisy:
    torch.manual_seed(seed)
    return Noisy(layers)


def without_times(path) -> list[dict]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in MonitorLog.read(path).records]


def test_training_with_a_monitor_has_the_bits_of_training_without(tmp_path):
    ends = []
    for watched in (False, True):
        model = small(layers=1)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = (
            Monitor(
                model,
                pair(),
                tmp_path / "run.jsonl",
                every=2,
                optimizer=optimizer,
                what={**ALL, "preconditioned": {}, "critical": {}},
            )
            if watched
            else None
        )
        train(model, 3, monitor, 0, optimizer)
        state = [x for one in optimizer.state.values() for x in one.values()]
        numbers = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
        ends.append(([*model.state_dict().values(), *state], numbers, model.training))
        assert model.calls == 6  # the model counts its calls, those of a measurement left out
    (alone, own, mode), (followed, numbers, training) = ends
    assert all(torch.equal(a, b) for a, b in zip(alone, followed, strict=True))
    assert own == numbers
    assert mode == training
    assert list(MonitorLog.read(tmp_path / "run.jsonl").steps) == [0, 1, 2]


def test_gradients_flags_and_modes_are_put_back(tmp_path):
    model = small()
    model.model.requires_grad_(True)
    frozen = next(model.parameters()).requires_grad_(False)
    model.train()
    model.model.eval()  # a part of the model stays in evaluation mode
    model(tokens(1)).sum().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: None if g is None else g.clone() for name, g in before.items()}
    with torch.no_grad():  # as in a trainer's callback
        what = {**ALL, "depth": {"what": ("variance", "gradient", "jacobian")}}
        Monitor(model, pair(), tmp_path / "run.jsonl", what=what).measure(3)
    for name, p in model.named_parameters():
        assert p.grad is before[name]
        assert p.grad is None or torch.equal(p.grad, copies[name])
    assert not frozen.requires_grad
    assert sum(not p.requires_grad for p in model.parameters()) == 1
    assert (model.training, model.dropout.training, model.model.training) == (True, True, False)


def test_a_line_holds_what_the_functions_measure(tmp_path):
    model = small(layers=1).eval()
    depth = ("variance", "angles", "drop", "jacobian")
    what = {"norms": {}, "sharpness": {"draws": 3}, "depth": {"what": depth}}
    monitor = Monitor(model, pair(), tmp_path / "run.jsonl", seed=7, what=what)
    record = monitor.measure(40, tokens_seen=torch.tensor(5))
    inputs, labels = pair()
    report = sharpness(model, inputs, labels, draws=3, seed=7 + 40 * SEED_STRIDE)
    assert record["sharpness"]["types"]["Norm"]["high"] == report.types["Norm"].high
    assert record["sharpness"]["layers"]["0"]["value"] == report.layers[0].value
    assert record["sharpness"]["tensors"] == {name: [e.value, e.standard_error] for name, e in report.tensors.items()}
    assert record["sharpness"]["ordering"] == report.ordering
    found = depth_diagnostics(model, inputs, labels, what=depth, seed=7).to_dict()
    assert record["depth"]["stream"] == found["stream"]
    assert record["depth"]["drop"] == found["drop"]
    assert record["depth"]["jacobians"]["gain"] == found["jacobians"]["gain"]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1).double(), labels.flatten())
    assert record["loss"] == pytest.approx(float(loss), rel=1e-6)
    square = sum(float(p.detach().double().square().sum()) for p in model.parameters())
    assert record["norms"]["total"] ** 2 == pytest.approx(square, rel=1e-12)
    assert sum(x**2 for x in record["norms"]["types"].values()) == pytest.approx(square, rel=1e-12)
    assert set(record["norms"]["tensors"]) == {part.name for part in monitor.parts}
    (read,) = MonitorLog.read(tmp_path / "run.jsonl").records
    assert read == json.loads(json.dumps(read))  # plain values
    assert read["extra"] == {"tokens_seen": 5}
    assert read["sharpness"] == record["sharpness"]


def test_steps_are_measured_once_and_on_time(tmp_path):
    monitor = Monitor(small(), pair(), tmp_path / "run.jsonl", every=12, log_spaced=True, what=())
    measured = [step for step in range(23) if monitor.step(step)]
    assert measured == [0, 1, 2, 5, 10, 12]  # 20 is no longer early
    assert monitor.step(22, force=True)["step"] == 22
    assert monitor.step(22, force=True) is None
    assert list(MonitorLog.read(monitor.path).steps) == [*measured, 22]
    with pytest.raises(hk.InputError, match="step=-1"):
        monitor.step(-1)


def test_a_killed_run_goes_on_from_a_checkpoint_as_if_it_had_not_been_killed(tmp_path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "run.jsonl"
    model = small(layers=1)
    train(model, 6, Monitor(model, pair(), whole, **QUICK))

    model = small(layers=1)
    monitor = Monitor(model, pair(), path, **QUICK)
    optimizer = train(model, 3, monitor)
    saved = {"model": {n: v.clone() for n, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved)
    state = torch.get_rng_state()
    train(model, 5, monitor, 3, optimizer)  # steps 4 and 5 come after the checkpoint and are lost
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote

    model = small(seed=1, layers=1)
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(state)
    monitor = Monitor(model, pair(), path, **QUICK)
    train(model, 6, monitor, 3, optimizer)
    once = {record["step"]: record for record in without_times(path)}
    assert list(once) == list(MonitorLog.read(path).steps)
    for record in without_times(whole):
        assert once[record["step"]] == record
    own = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [one.get("step") for one in own].count(4) == 2  # the first one was measured before the kill
    assert {"rewind": 3} in own


def test_a_file_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    Monitor(small(), pair(), path, **QUICK)
    for model, data, change, message in (
        (small(), pair(), {"sharpness": {"draws": 3}}, r"options\['sharpness'\]\['draws'\] is 2 there, 3 here"),
        (small(), pair(), {"preconditioned": {}}, r"sections\[5\] is None there, 'preconditioned' here"),
        (small(), pair(3), {}, "data is '.*' there"),
        (small(layers=1), pair(), {}, "entries is .* there"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if "preconditioned" in change else None
        with pytest.raises(hk.InputError, match=f"is of another run: .*{message}"):
            Monitor(model, data, path, every=2, what={**ALL, **change}, optimizer=optimizer)


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g.clone()


def test_a_section_that_fails_is_written_down(tmp_path):
    """A model whose second derivative does not exist, and neither do its blocks."""
    what = {**ALL, "eigenvalue": {"route": "autograd"}}
    breaking = Formula(lambda m, x: m.head(OnceOnly.apply(m.wte(x))), wte=nn.Embedding(13, 4), head=nn.Linear(4, 13))
    monitor = Monitor(breaking, pair(), tmp_path / "run.jsonl", on_error="record", what=what)
    record = monitor.step(0)
    assert set(record["errors"]) == {"eigenvalue", "depth"}
    assert "H is not symmetric" in record["errors"]["eigenvalue"]  # torch says nothing
    assert record["sharpness"]["types"]["Head"]["value"] > 0
    assert "step 0: depth failed: InputError:" in str(MonitorLog.read(monitor.path))


def test_a_full_disk_does_not_stop_training(tmp_path, monkeypatch):
    monitor = Monitor(small(), pair(), tmp_path / "run.jsonl", every=1, on_error="record", what=())
    monitor.step(0)

    with full_disk(monkeypatch):
        with pytest.warns(UserWarning, match="No space left on device"):
            assert monitor.step(1)["step"] == 1
        assert monitor.step(1, force=True) is None
    monitor.step(3)
    assert MonitorLog.read(monitor.path).steps.tolist() == [0, 1, 3]


def test_divergence_is_measured_as_far_as_it_goes(tmp_path):
    model = small()
    nn.init.constant_(next(model.parameters()), float("nan"))
    monitor = Monitor(model, pair(), tmp_path / "run.jsonl", on_error="record", **QUICK)
    monitor.step(0)
    log = MonitorLog.read(monitor.path)
    assert np.isnan(log.series("loss")).all()
    assert set(log.errors[0]) == {"sharpness", "eigenvalue", "depth"}


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (pair(), {"every": 0}, "every=0 measures at no step"),
        (pair(), {"what": "norms"}, "what is a str; pass a list or a dict"),
        (pair(), {"what": ("norm",)}, "what='norm' is not known; did you mean 'norms'"),
        (pair(), {"what": {"eigenvalue": True}}, "what={'eigenvalue': True}; expected a dict of options, such as {}"),
        (pair(), {"what": {"depth": {"what": ("angle",)}}}, "what='angle' is not known"),
        (pair(), {"what": {"sharpness": {"per": "sample"}}}, "per='sample' is not known"),
        (pair(), {"what": {"sharpness": {"draws": 0}}}, "draws=0 draws no labels"),
        (pair(), {"what": {"eigenvalue": {"route": "exact"}}}, "route='exact' is not known"),
        (pair(), {"what": {"eigenvalue": {"tol": "1"}}}, "monitor: tol is a str; pass a number"),
        (pair(), {"what": ("critical",)}, "monitor: no optimizer; pass optimizer= together with"),
        (pair(), {"optimizer": torch.optim.SGD([torch.ones(1)], 0.1)}, "monitor: an optimizer, which no measurement reads; pass"),
        (pair(), {"on_error": "ignore"}, "on_error='ignore' is not known"),
        (tokens(0), {}, "monitor: data is a tensor"),
        ((tokens(0), torch.full((4, 9), -100)), {}, "no label that counts"),
    ],
)
def test_arguments_that_do_not_fit_are_named(tmp_path, data, options, message):
    with pytest.raises(hk.InputError, match=message):
        Monitor(small(), data, tmp_path / "run.jsonl", **options)


def test_an_option_that_a_measurement_does_not_have_is_named(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'draw'; did you mean 'draws'"):
        Monitor(small(), pair(), tmp_path / "run.jsonl", what={"sharpness": {"draw": 2}})


def test_numbers_go_to_a_logger(tmp_path):
    """``log`` is called as the loggers' own functions are, with what the line holds, and not where nothing is measured."""
    seen = []
    model = small(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    what = ("norms", "sharpness", "eigenvalue", "preconditioned", "critical")
    log = lambda numbers, *, step: seen.append((step, numbers))  # noqa: E731
    monitor = Monitor(model, pair(), tmp_path / "run.jsonl", every=2, what=what, optimizer=optimizer, log=log)
    train(model, 3, monitor, optimizer=optimizer)
    records = MonitorLog.read(monitor.path).records
    assert [step for step, _ in seen] == [0, 1, 2] == [record["step"] for record in records]
    for record, (_, numbers) in zip(records, seen, strict=True):
        assert numbers["monitor/loss"] == record["loss"]
        assert numbers["sharpness/Norm"] == record["sharpness"]["types"]["Norm"]["value"]
        assert numbers["norm/FFN"] == record["norms"]["types"]["FFN"]
        assert numbers["top_eigenvalue"] == record["eigenvalue"]["value"]
        assert numbers["preconditioned/over_threshold"] == record["preconditioned"]["ratio"]
        assert numbers["critical/multiple"] == record["critical"]["multiple"]


def test_data_are_read_once_without_drawing(tmp_path):
    data = torch.utils.data.TensorDataset(*pair(rows=6))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model = small()
    before = torch.get_rng_state()
    monitor = Monitor(model, loader, tmp_path / "run.jsonl")
    assert torch.equal(before, torch.get_rng_state())
    assert monitor.measure(0)["loss"] == monitor.measure(0)["loss"]
    assert len(MonitorLog.read(monitor.path)) == 1


def test_the_model_inside_a_wrapper_is_measured(tmp_path):
    model = small()
    compiled = nn.Module()
    compiled._orig_mod = nn.DataParallel(model)  # as torch.compile keeps it
    assert bare(compiled) is model
    monitor = Monitor(nn.DataParallel(model), pair(), tmp_path / "run.jsonl")
    assert all(not name.startswith("module.") for name in monitor.measure(0)["norms"]["tensors"])


def test_a_measurement_of_ones_own(tmp_path):
    def largest(model, batches, step):
        assert not model.training
        assert batches
        return {"entry": max(float(p.detach().abs().max()) for p in model.parameters()), "step": step}

    model = small()
    monitor = Monitor(model, pair(), tmp_path / "log.jsonl", what=(), own={"largest": largest})
    line = monitor.measure(3)
    assert line["largest"] == {"entry": max(float(p.detach().abs().max()) for p in model.parameters()), "step": 3}
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["options"]["largest"] == "own"
    with pytest.raises(hk.InputError, match="own='loss' is the name of another part of a line"):
        Monitor(model, pair(), tmp_path / "b.jsonl", own={"loss": largest})
    failing = Monitor(model, pair(), tmp_path / "c.jsonl", own={"mine": lambda *_: 1 / 0})
    with pytest.raises(hk.InputError, match=r"mine at step 0 failed: ZeroDivisionError.*mend your function"):
        failing.measure(0)
    assert "norms" in MonitorLog.read(failing.path).records[0]  # the other parts are kept
