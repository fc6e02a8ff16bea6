"""The top eigenvalue by both routes, against the dense Hessian by reverse-over-reverse of the loss written out again."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import gradient_twice
from torch import nn

import hessiankit as hk
from hessiankit.diagnostics.monitoring import measurements
from hessiankit.diagnostics.monitoring.measurements import batches_of, loss_of


class Tiny(nn.Module):
    """One head of fused attention, so that its unfused form has to be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.E = nn.Embedding(6, 3)
        self.Q, self.K, self.V = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.C = nn.Linear(3, 6)

    def forward(self, x):
        x = self.E(x)
        q, k, v = (f(x).unsqueeze(1) for f in (self.Q, self.K, self.V))
        return self.C(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def eigenvalue(model, batches, route="auto", tol=1e-3, products=60):
    return measurements.eigenvalue(model, batches, 0, route=route, tol=tol, products=products, seed=0)


def tiny(dtype=torch.float64) -> Tiny:
    torch.manual_seed(0)
    return Tiny().to(dtype).eval()


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

    class Unread(Tiny):
        def forward(self, x):
            z = super().forward(x)
            return z, z.detach(), 1  # what the closed forms do not take

    model = Unread().eval()
    found = eigenvalue(model, batches)
    assert found["route"] == "autograd"
    assert found["why"].startswith("InputError: ")
    assert found["value"] > 0
    with pytest.raises(hk.InputError):
        eigenvalue(model, batches, route="closed form")
    with pytest.raises(hk.InputError, match="no parameter requires a gradient"):
        eigenvalue(model.requires_grad_(False), batches)


def test_labels_of_a_hugging_face_batch_are_moved_by_one():
    tokens = torch.tensor([[1, 2, 3, 4], [2, 2, 0, 5]])
    labels = tokens.clone()
    labels[1, 3] = -100
    model = tiny()
    (inputs, target), *rest = batches_of(model, {"x": tokens, "labels": labels})
    assert not rest
    assert target.tolist() == [[2, 3, 4, -100], [2, 0, -100, -100]]
    logits = model(tokens)[:, :-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert loss_of(model, [(inputs, target)]).evaluate()[0] == pytest.approx(expected.item(), rel=1e-14)
    (_, classes), *_ = batches_of(model, {"x": tokens, "labels": torch.tensor([0, 1])})
    assert classes.tolist() == [0, 1]  # of sequences, not of tokens


@pytest.mark.parametrize("route", ["closed form", "autograd"])
def test_the_autocast_of_a_training_loop_is_left_out(route):
    model = tiny(torch.float32)
    plain = eigenvalue(model, batches_of(model, data()), route)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert eigenvalue(model, batches_of(model, data()), route) == plain
