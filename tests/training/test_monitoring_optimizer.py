"""What a monitor measures of curvature and optimizer: eigenvalues by both routes, metric, next step."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import Formula, gradient_twice
from monitoring_cases import Noisy, pair, train
from torch import nn

import hessiankit as hk
from hessiankit.training.monitoring import Monitor, MonitorLog, measurements
from hessiankit.training.monitoring.measurements import MonitoredRun, batches_of, scalars

OF_OPTIMIZERS = {"what": ("preconditioned", "critical")}


def trained(steps: int = 3, *, double: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Noisy(1).double() if double else Noisy(1)
    return model, train(model, steps)


@pytest.mark.parametrize("route", ["closed form", "autograd"])
def test_the_sections_are_what_the_functions_return(route: str, tmp_path) -> None:
    model, optimizer = trained()
    next(model.parameters()).requires_grad_(route == "autograd")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = [pair(1), pair(2, rows=2)]
    what = {"preconditioned": {"route": route, "tol": 1e-9, "products": 200}, "critical": {}}
    record = Monitor(model, data, tmp_path / "run.jsonl", optimizer=optimizer, what=what).measure(0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    whole = [torch.cat(x) for x in zip(*data, strict=True)]
    found = hk.spectrum(model.eval(), *whole, loss="cross_entropy", k=1, params=names, preconditioner=optimizer)
    own = record["preconditioned"]
    assert own["value"] == pytest.approx(float(found.eigenvalues[0]), rel=1e-9)
    assert (own["ratio"], own["threshold"]) == (pytest.approx(found.threshold_ratio), found.preconditioner.threshold)
    step = hk.critical_sharpness(model, *whole, loss="cross_entropy", params=names, optimizer=optimizer).to_dict()
    for name in ("sharpness", "multiple", "raising", "curvature", "slope", "length", "loss"):
        assert record["critical"][name] == pytest.approx(step[name], rel=1e-6)
    assert record["critical"]["passes"] <= 10
    numbers = scalars(record)
    assert numbers["preconditioned/over_threshold"] == own["ratio"]
    assert numbers["critical/multiple"] == record["critical"]["multiple"]


def test_two_optimizers_are_measured_together(tmp_path) -> None:
    model, _ = trained()
    pieces = [list(model.parameters())[::2], list(model.parameters())[1::2]]
    optimizers = [torch.optim.SGD(piece, lr=rate) for piece, rate in zip(pieces, (0.1, 0.2), strict=True)]
    one = torch.optim.SGD([{"params": piece, "lr": rate} for piece, rate in zip(pieces, (0.1, 0.2), strict=True)])
    records = [
        Monitor(model, pair(), tmp_path / f"{k}.jsonl", optimizer=held, **OF_OPTIMIZERS).measure(0)
        for k, held in enumerate((optimizers, one))
    ]
    for name in ("value", "threshold", "lr"):
        assert records[0]["preconditioned"][name] == records[1]["preconditioned"][name]
    assert records[0]["critical"] == records[1]["critical"]


def test_before_the_first_step_there_is_no_metric_yet(tmp_path) -> None:
    torch.manual_seed(0)
    model = Noisy(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, pair(), tmp_path / "run.jsonl", every=1, optimizer=optimizer, **OF_OPTIMIZERS)
    record = monitor.step(0)
    assert record["preconditioned"] == {"waiting": "the optimizer has taken no step"}
    assert record["critical"]["multiple"] > 0
    assert "preconditioned/eigenvalue" not in scalars(record)
    train(model, 3, monitor, 0, optimizer)
    assert "eigenvalue / threshold" in str(MonitorLog.read(monitor.path))
    optimizer.param_groups[0]["lr"] = 0.0  # as at the end of a schedule
    record = monitor.measure(4)
    assert record["preconditioned"] == record["critical"] == {"waiting": "the learning rate is 0"}


def test_a_warm_search_is_shorter_the_same_every_time_and_sees_another_vector_rise() -> None:
    model, optimizer = trained(double=False)
    model.eval()
    batches = measurements.batches_of(model, pair(rows=6))
    run, options = MonitoredRun(model, optimizers=(optimizer,)), {"route": "closed form", "tol": 1e-4, "products": 200}
    cold = measurements.preconditioned(run, **options, warm_start=False)
    first = cold(batches, 0)
    assert cold(batches, 1) == first
    again = []
    for _ in range(2):
        warm = measurements.preconditioned(run, **options)
        assert warm(batches, 0) == first
        again.append(warm(batches, 1))
    assert again[0] == again[1]
    assert again[0]["products"] < first["products"]
    assert again[0]["value"] == pytest.approx(first["value"], rel=1e-4)
    second = hk.spectrum(model, *pair(rows=6), loss="cross_entropy", k=2).eigenvectors[:, 1]
    search = measurements.eigenvalue(run, **options)
    plain = search(batches, 0)
    search.vector = second.contiguous()  # as where another eigenvalue has overtaken the one of the last search
    assert search(batches, 1)["value"] == pytest.approx(plain["value"], rel=1e-4)


def attend(m, tokens):
    """One head of fused attention, so that its unfused form has to be asked for."""
    x = m.E(tokens)
    q, k, v = ((x @ W).unsqueeze(1) for W in (m.Q, m.K, m.V))
    return m.C(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def eigenvalue(model, batches, route="auto", tol=1e-3, products=60):
    return measurements.eigenvalue(MonitoredRun(model), route=route, tol=tol, products=products)(batches, 0)


def tiny(dtype=torch.float64, forward=attend) -> Formula:
    return Formula(forward, E=nn.Embedding(6, 3), Q=(3, 3), K=(3, 3), V=(3, 3), C=nn.Linear(3, 6)).to(dtype).eval()


def data():
    """Two batches of unequal sizes and counts, with labels that do not count."""
    draw = torch.Generator().manual_seed(1)
    pairs = [(torch.randint(6, (n, 5), generator=draw), torch.randint(6, (n, 5), generator=draw)) for n in (3, 1)]
    pairs[0][1][0, :3] = -100
    return pairs


def by_hand(model: nn.Module, pairs) -> torch.Tensor:
    """The mean over all counted tokens, term by term, differentiated twice entry by entry."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        terms = [
            -torch.log_softmax(logits, 0)[label]
            for x, y in pairs
            for b in range(len(x))
            for logits, label in zip(model(x[b : b + 1])[0], y[b], strict=True)
            if label >= 0
        ]
        loss = sum(terms) / len(terms)
    return gradient_twice(loss, parameters)


@pytest.mark.parametrize("frozen", [False, True])
def test_both_routes_find_the_eigenvalue_of_the_dense_hessian(frozen):
    model, pairs = tiny(), data()
    model.E.weight.requires_grad_(not frozen)
    values = torch.linalg.eigvalsh(by_hand(model, pairs))
    model.unread = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for route in ("closed form", "autograd"):
        found = eigenvalue(model, batches_of(model, pairs), route=route, tol=1e-11, products=400)
        assert (found["route"], found["converged"], "why" in found) == (route, True, False)
        assert abs(found["value"] - float(values[-1])) <= 1e-10 * float(values.abs().max())


def test_the_routes_are_told_apart(monkeypatch):
    model, batches = tiny(torch.float32), batches_of(tiny(), data())
    assert eigenvalue(model, batches)["route"] == "closed form"
    monkeypatch.setattr(measurements, "CLOSED_FORM_ENTRIES", 10)
    found = eigenvalue(model, batches)
    assert (found["route"], found["why"]) == ("autograd", "69 parameters, more than 10")
    monkeypatch.undo()

    def unread(m, tokens):
        z = attend(m, tokens)
        return z, z.detach(), 1  # what the closed forms do not take

    model = tiny(torch.float32, unread)
    found = eigenvalue(model, batches)
    assert found["route"] == "autograd"
    assert found["why"].startswith("InputError: ")
    assert found["value"] > 0
    with pytest.raises(hk.InputError):
        eigenvalue(model, batches, route="closed form")
    with pytest.raises(hk.InputError, match="no parameter requires a gradient"):
        eigenvalue(model.requires_grad_(False), batches)


@pytest.mark.parametrize("route", ["closed form", "autograd"])
def test_the_autocast_of_a_training_loop_is_left_out(route):
    model = tiny(torch.float32)
    plain = eigenvalue(model, batches_of(model, data()), route)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert eigenvalue(model, batches_of(model, data()), route) == plain
