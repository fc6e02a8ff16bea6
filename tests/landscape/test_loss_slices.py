"""Loss slices against the loss of copies of the module, and the radius of the quadratic model against a known one."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from curvature_reference import Formula
from operator_cases import T, X, block, classifier, tokens
from torch import nn

import hessiankit as hk
from hessiankit.landscape import loss_slices as called


def moved(module: nn.Module, d: torch.Tensor) -> nn.Module:
    other = copy.deepcopy(module)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(other.parameters()) + d, other.parameters())
    return other


def squared_error(module: nn.Module) -> float:
    with torch.no_grad():
        return float((module(X) - T).square().mean())


def vector(size: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_losses_are_those_of_a_moved_copy_and_the_module_stays() -> None:
    module = block()
    before = copy.deepcopy(module.state_dict())
    D = torch.stack([vector(88), vector(88, 6)], dim=1)
    found = hk.loss_slices(module, X, T, along=D, span=(-0.3, 0.5), points=5)
    for one, d in zip(found.slices, D.T, strict=True):
        expected = [squared_error(moved(module, t * d)) for t in one.t.tolist()]
        assert one.losses.tolist() == pytest.approx(expected, rel=1e-13)
        assert one.length == pytest.approx(float(d.norm()))
        H = hk.hessian(module, X, T)
        assert one.curvature == pytest.approx(float(d @ H.matrix @ d), rel=1e-12)
        assert one.slope == pytest.approx(float(hk.hessian_operator(module, X, T).gradient @ d), rel=1e-12)
        up, here, down = (squared_error(moved(module, t * d)) for t in (1e-4, 0.0, -1e-4))
        assert (up - 2 * here + down) / 1e-8 == pytest.approx(one.curvature, rel=1e-4)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_batches_and_labels_that_are_left_out() -> None:
    module, ids = classifier(), tokens(4, 3)
    labels = torch.tensor([[0, 2, 1], [-100, -100, 2], [-100, -100, -100], [1, -100, 0]])
    d = vector(sum(p.numel() for p in module.parameters()))
    one = hk.loss_slices(module, ids, labels, loss="cross_entropy", along=d, span=(0.0, 0.2), points=3)[0]
    pairs = zip(ids.split([1, 3]), labels.split([1, 3]), strict=True)
    two = hk.loss_slices(module, pairs, loss="cross_entropy", along=d, span=(0.0, 0.2), points=3)[0]
    assert two.losses.tolist() == pytest.approx(one.losses.tolist(), rel=1e-13)
    assert two.curvature == pytest.approx(one.curvature, rel=1e-11)


@pytest.mark.parametrize(("tolerance", "sign"), [(0.1, 1.0), (0.02, 1.0), (0.1, -1.0)])
def test_the_radius_is_that_of_a_known_function(tolerance: float, sign: float) -> None:
    """Of w^2 + w^3 at 0 the model w^2 is off by |w|^3 <= tolerance w^2 up to |w| = tolerance."""
    module = Formula(lambda m, x: m.w**2 + sign * m.w**3 + 0 * x.sum(), w=(1,))
    module.w.data.zero_()
    x = torch.ones(1, dtype=torch.float64)
    options = {"along": x, "loss": lambda out, target: out.sum(), "tolerance": tolerance}
    found = hk.loss_slices(module, x, x, **options)[0]
    assert (found.slope, found.curvature) == (0.0, 2.0)
    assert found.bounded
    assert found.radius == pytest.approx(tolerance, rel=1e-3)
    short = hk.loss_slices(module, x, x, **options, span=(-2 * tolerance, tolerance / 4))[0]
    assert not short.bounded  # the model fails at negative steps, which are longer
    assert short.radius == pytest.approx(tolerance / 4)


def test_a_quadratic_loss_is_its_own_model() -> None:
    layer = nn.Linear(3, 2).double()
    x, t = vector(12).reshape(4, 3), vector(8).reshape(4, 2)
    found = hk.loss_slices(layer, x, t, along=hk.spectrum(layer, x, t, k=2, bottom=1), span=(-5.0, 5.0))
    assert len(found) == 3
    for one in found.slices:
        assert (one.radius, one.bounded) == (5.0, False)
        assert one.quadratic.tolist() == pytest.approx(one.losses.tolist(), rel=1e-10)
    assert found[0].name.startswith("eigenvalue ")
    flat = Formula(lambda m, x: x + m.w - m.w, w=(1,))  # constant to rounding
    x = torch.full((1,), 0.1, dtype=torch.float64)
    one = hk.loss_slices(flat, x, x, along=x + 2, loss=lambda out, target: out.sum())[0]
    assert one.losses.unique().numel() > 1
    assert (one.radius, one.bounded) == (1.0, False)


def test_the_line_to_a_checkpoint_ends_there() -> None:
    module, other = block(), moved(block(), 0.1 * vector(88))
    found = hk.loss_slices(module, X, T, along=other.state_dict(), points=5)
    one = found[0]
    assert one.t.tolist() == [-0.5, 0.0, 0.5, 1.0, 1.5]
    assert float(one.losses[3]) == pytest.approx(squared_error(other), rel=1e-12)
    assert found.notes == ()
    there = {**other.state_dict(), "norm_2.weight": module.norm_2.weight.detach()}
    part = hk.loss_slices(module, X, T, along=there, points=5, params="attention.*")
    assert "'norm_1.weight'" in part.notes[0]
    assert "'norm_2.weight'" not in part.notes[0]  # which is the same in both
    assert "not moved" in str(part)


def test_a_plane_is_the_loss_of_moved_copies_beside_its_quadratic_model() -> None:
    module, D = block(), torch.stack([vector(88), vector(88, 6)], dim=1)
    found = hk.loss_slices(module, X, T, along=D, span=(-0.2, 0.4), points=4, plane=True)
    H, g = hk.hessian(module, X, T).matrix, hk.hessian_operator(module, X, T).gradient
    for i, a in enumerate(found.plane.t.tolist()):
        for j, b in enumerate(found.plane.t.tolist()):
            step = D @ torch.tensor([a, b], dtype=torch.float64)
            assert float(found.plane.losses[i, j]) == pytest.approx(squared_error(moved(module, step)), rel=1e-12)
            model = squared_error(module) + g @ step + 0.5 * step @ H @ step
            assert float(found.plane.quadratic[i, j]) == pytest.approx(float(model), rel=1e-11)
    zero = found.plane.t.tolist().index(0.0)
    assert found.plane.losses[:, zero].tolist() == pytest.approx(found[0].losses.tolist(), rel=1e-13)
    assert found.plane.quadratic[zero].tolist() == pytest.approx(found[1].quadratic.tolist(), rel=1e-12)
    assert "2 slices of 4 steps, with their plane, through a loss of " in str(found)
    assert f"{float(found.plane.losses[1, 2]):.4g}" in str(found.plane).splitlines()[4]
    assert f"{float(found[0].quadratic[1]):.4g}" in str(found[0]).splitlines()[4]
    assert len(found.plot().axes) == 3
    assert json.loads(json.dumps(found.to_dict()))["plane"]["losses"] == found.plane.losses.tolist()


def test_the_plane_through_three_checkpoints() -> None:
    one, two = moved(block(), 0.1 * vector(88)), moved(block(), 0.1 * vector(88, 6))
    found = hk.loss_slices(block(), X, T, along=[one.state_dict(), two.state_dict()], points=5, plane=True)
    assert [piece.name for piece in found.slices] == ["to checkpoint 1", "to checkpoint 2"]
    corners = found.plane.losses[3, 1], found.plane.losses[1, 3], found.plane.losses[1, 1]
    assert [float(x) for x in corners] == pytest.approx([squared_error(m) for m in (one, two, block())], rel=1e-12)


def test_filters_have_the_length_of_the_modules() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    x, t = vector(12).reshape(4, 3), vector(4).reshape(4, 1)
    d, at, parts = vector(11), 0, []
    d[:3] = 0  # a filter that does not move
    one = hk.loss_slices(module, x, t, along=d, normalise="filter", span=(0.0, 1.0), points=2)[0]
    for p in module.parameters():
        rows = d[at : at + p.numel()].reshape(p.shape)
        scaled = (
            rows * p.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True).clamp(min=1e-300) if p.ndim == 2 else 0 * rows
        )
        parts.append(scaled.detach().reshape(-1))
        at += p.numel()
    assert one.length == pytest.approx(float(torch.cat(parts).norm()))
    expected = float((moved(module, torch.cat(parts))(x) - t).detach().square().mean())
    assert float(one.losses[-1]) == pytest.approx(expected, rel=1e-12)
    two = hk.loss_slices(module, x, t, along=torch.stack([d, 3 * vector(11)], dim=1), normalise="unit", points=3)
    assert [one.length for one in two.slices] == pytest.approx([1.0, 1.0])


def test_prints_and_pictures(tmp_path) -> None:
    found = hk.loss_slices(block(), X, T, along=torch.stack([vector(88, k) for k in range(4)], dim=1), points=5)
    assert "4 slices of 5 steps" in repr(found)
    assert "<table>" in found._repr_html_()
    json.dumps(found.to_dict(), allow_nan=False)
    picture = found.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size
    assert len(picture.axes) == 4


BAD = {
    "short": (lambda m: called(m, X, T, along=vector(87)), r"along is torch.float64 of shape \(87,\); expected a vector \(88,\)"),
    "integers": (lambda m: called(m, X, T, along=torch.ones(88).long()), "along is torch.int64"),
    "not a direction": (lambda m: called(m, X, T, along=3), "along is int"),
    "zero": (lambda m: called(m, X, T, along=0 * vector(88)), "a direction is zero"),
    "NaN": (lambda m: called(m, X, T, along=math.nan * vector(88)), "NaN or infinite"),
    "span": (lambda m: called(m, X, T, along=vector(88), span=(0.5, 1.0)), r"span=\(0.5, 1.0\)"),
    "points": (lambda m: called(m, X, T, along=vector(88), points=1), "points=1"),
    "tolerance": (lambda m: called(m, X, T, along=vector(88), tolerance=2.0), "tolerance=2.0"),
    "no tolerance": (lambda m: called(m, X, T, along=vector(88), tolerance=0.0), "tolerance=0.0"),
    "normalise": (lambda m: called(m, X, T, along=vector(88), normalise="layer"), "normalise='layer' is not known"),
    "overflow": (lambda m: called(m, X, T, along=1e300 * vector(88)), "the loss at t=.* is (nan|inf); pass a smaller span"),
    "no such name": (lambda m: called(m, X, T, along={"w": vector(1)}), "the checkpoint's 'w' is not known"),
    "shape": (
        lambda m: called(m, X, T, along={**m.state_dict(), "norm_1.weight": vector(1)}),
        r"'norm_1.weight' of the checkpoint is \(1,\)",
    ),
    "missing": (lambda m: called(m, X, T, along={}), "the checkpoint has no 'attention.W_Q'"),
    "plane": (lambda m: called(m, X, T, along=vector(88), plane=True), "plane=True needs two directions, and along has 1"),
    "dropout": (lambda m: called(nn.Sequential(m, nn.Dropout(0.1)), X, T, along=vector(88)), "dropout layer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(hk.InputError, match=message) as seen:
        call(block())
    assert str(seen.value).startswith("loss_slices: ")
    assert "\n" not in str(seen.value)
