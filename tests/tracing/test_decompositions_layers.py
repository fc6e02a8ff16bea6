"""Convolutions, norms over other axes, distances, products and losses that are made of simpler operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_exact, draw, mse, randomised, reverse_over_reverse
from operation_cases import applied, check_closed_form, module_of
from operator_cases import error
from readings import assert_readings, in_turn
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hessiankit as hk
from hessiankit.primitives.cast import Cast
from hessiankit.primitives.linear import Linear, MatMul
from hessiankit.primitives.normalization import LayerNorm

T, B = draw(2, 3, 4, seed=13), draw(4, seed=11)
CONVOLUTIONS = {
    "conv1d": lambda y: F.conv1d(y, T[:, :, :2], B[:2]),
    "conv1d, strides": lambda y: F.conv1d(y, T[:, :, :2], B[:2], stride=2, padding=1),
    "conv1d, same": lambda y: F.conv1d(y, T[:, :, :3], B[:2], padding="same"),
    "conv1d, groups and dilation": lambda y: F.conv1d(y.mT, T.permute(2, 0, 1)[:, :, :2], B, groups=2, dilation=2),
    "conv2d, strides": lambda y: F.conv2d(y.unsqueeze(1), T[:, None, :2, :3], stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    "conv2d, tiles": lambda y: F.conv2d(y[:, None, :2], T[:, None, :2, :2], B[:2], stride=2),
    "conv2d, tiles with a rest": lambda y: F.conv2d(y[:, None], T[:, None, :2, :2], stride=2),
    "conv2d, by channel": lambda y: F.conv2d(y.unflatten(-1, (2, 2)), T.reshape(6, 1, 2, 2)[:3], B[:3], groups=3, padding=1),
    "conv3d": lambda y: F.conv3d(y[None, None], T[:, None, None, :2, :2]),
    "conv_transpose1d, strides": lambda y: F.conv_transpose1d(y, T[0].reshape(3, 2, 2), None, 2, 1, 1, dilation=2),
    "conv_transpose2d": lambda y: F.conv_transpose2d(y[None], T.reshape(2, 3, 2, 2), B[:3], stride=(2, 1), padding=(1, 0)),
    "conv_transpose2d, groups": lambda y: F.conv_transpose2d(y[:, :2, None], T[0, :2].reshape(2, 1, 2, 2), groups=2),
    "conv_transpose2d, one sample": lambda y: F.conv_transpose2d(y, T.reshape(2, 3, 2, 2)),
}
NORMS = {
    "group_norm": lambda y: F.group_norm(y.mT, 2, B, B),
    "group_norm without a gain": lambda y: F.group_norm(y, 3),
    "instance_norm": lambda y: F.instance_norm(y, weight=B[:3], bias=B[1:]),
    "instance_norm, moving gain": lambda y: F.instance_norm(y, weight=y[0, :, 0]),
}
PARTS = {
    "instance_norm by statistics": lambda y: F.instance_norm(y, B[:3], B[1:].abs(), use_input_stats=False),
    "batch_norm": lambda y: F.batch_norm(y, B[:3], B[1:].abs(), B[:3], B[1:]),
    "cross product": lambda y: torch.linalg.cross(y[..., 1:], T[..., 1:]),
    "normalize by the sum": lambda y: F.normalize(y, p=1, dim=1),
    "cosine_similarity": lambda y: F.cosine_similarity(y, T, -1),
    "pairwise_distance": lambda y: F.pairwise_distance(y, T),
    "norm of order 1": lambda y: torch.linalg.vector_norm(y, 1, -1),
    "norm of order 3": lambda y: torch.linalg.vector_norm(y, 3, -1, keepdim=True),
    "norm of order infinity": lambda y: torch.linalg.vector_norm(y, float("inf"), -1),
    "linalg.norm": lambda y: torch.linalg.norm(y, dim=-1),
    "norm of a matrix": lambda y: torch.linalg.matrix_norm(y),
    "norm of order 3 of all": lambda y: y.norm(3),
    "dist": lambda y: torch.dist(y, T),
    "bilinear": lambda y: F.bilinear(y, y[..., :2], T.reshape(2, 3, 4)[:, :2].mT, B[:2]),
    "addr": lambda y: torch.addr(y[0, :, :3], y[0, :, 0], y[1, :, 1], beta=2, alpha=3),
    "prod": lambda y: y.prod(1),
    "prod with zeros": lambda y: (y * (T > 0)).prod(-1),
    "prod of all": torch.prod,
    "cumprod": lambda y: y.cumprod(1),
    "nanmean": lambda y: torch.where(T > 1, torch.nan, y).nanmean(1),
    "diff": lambda y: torch.diff(y, dim=1),
    "trapezoid": lambda y: torch.trapezoid(y, dx=0.5, dim=1),
    "cov": lambda y: torch.cov(y[0]),
    "corrcoef": lambda y: torch.corrcoef(y[0]),
    "kron": lambda y: torch.kron(y, T[0]),
    "multi_dot": lambda y: torch.linalg.multi_dot([y[0], T[0].T, y[1]]),
    "matrix_power": lambda y: torch.linalg.matrix_power(y @ T.mT, 3),
    "vecdot": lambda y: torch.linalg.vecdot(y, T),
    "meshgrid": lambda y: torch.mul(*torch.meshgrid(y[0, 0], y[0, 1], indexing="ij")),
    "cartesian_prod": lambda y: torch.cartesian_prod(y[0, 0], y[0, 1]),
    "softmin": lambda y: F.softmin(y, -1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name):
    check_closed_form(CONVOLUTIONS[name])
    assert {Linear, MatMul} & {type(p) for p in applied(module_of(CONVOLUTIONS[name]))[2:]}


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(3, 4, 3, padding=1)], ids=str)
def test_views_of_an_image(layer):
    """A result has the strides of torch's, which ``view`` needs."""
    x, target = draw(2, 3, 4, 4, seed=3), torch.zeros(2, dtype=torch.float64)
    assert_exact(Formula(lambda m, x: m.layer(x).view(2, -1).square().mean(1), layer=randomised(layer)), x, target)


@pytest.mark.parametrize("name", NORMS)
def test_norm(name):
    check_closed_form(NORMS[name], LayerNorm)


@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    check_closed_form(PARTS[name])


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_cdist_which_autograd_differentiates_once(p):
    x, target = draw(2, 3, 5), torch.zeros(2, 3, 3).double()
    found = hk.hessian(module_of(lambda y: torch.cdist(y, T, p)), x, target)
    written = module_of(lambda y: (y.unsqueeze(2) - T.unsqueeze(1)).abs().pow(p).sum(-1).pow(1 / p))
    assert error(found.matrix, reverse_over_reverse(written, x, target, mse)) <= 1e-12
    assert found.fallbacks == ()


def test_distances_from_itself():
    """The distance of a row from itself is 0 at any parameters."""
    off = ~torch.eye(3, dtype=torch.bool)
    x, target = draw(2, 3, 5), torch.zeros(2, 3, 3).double()
    pairs = module_of(lambda y: (y.unsqueeze(2) - y.unsqueeze(1))[:, off].norm(dim=-1))
    found = hk.hessian(module_of(lambda y: torch.cdist(y, y)), x, target)
    assert error(found.matrix * 1.5, reverse_over_reverse(pairs, x, target[:, off], mse)) <= 1e-12  # a mean of 12, not of 18
    assert found.fallbacks == ()


@pytest.mark.parametrize(
    "normalise",
    [
        lambda z: F.normalize(z, dim=-1, eps=1e-3),
        lambda z: F.cosine_similarity(z.unsqueeze(-2), torch.eye(4).double(), -1, 1e-3),
    ],
)
def test_rows_of_zeros_divided_by_a_norm_with_a_floor(normalise):
    """A row below the floor is divided by a constant."""
    x, target = draw(3, 5), draw(3, 4)
    x[1] = 0
    zero = ~x.any(-1, keepdim=True)
    written = Formula(lambda s, x: (z := x @ s.W) / torch.where(zero, 1e-6, (z.square() + zero).sum(-1, True)).sqrt(), W=(5, 4))
    found = hk.hessian(Formula(lambda s, x: normalise(x @ s.W), W=(5, 4)), x, target).matrix
    assert error(found, reverse_over_reverse(written, x, target, mse)) <= 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean", "padding_idx": 1},
        {"mode": "sum", "include_last_offset": True},
        {"mode": "sum", "padding_idx": -3, "weighted": True},
    ],
    ids=str,
)
def test_bags_of_embeddings_which_autograd_differentiates_once(options):
    """The second bag is empty."""
    chosen = dict(options)
    weighted, padding, last = chosen.pop("weighted", False), options.get("padding_idx", 5) % 5, options.get("include_last_offset")
    indices, offsets = torch.tensor([0, 1, 1, 4, 2, 0]), torch.tensor([0, 3, 3, 5] + [6] * bool(last))

    def bags(s: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        weights = s.w if weighted else None
        return torch.tanh(F.embedding_bag(indices, s.E, offsets, per_sample_weights=weights, **chosen))

    def written(s: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        rows = []
        for start, end in ((0, 3), (3, 3), (3, 5), (5, 6)):
            kept = [k for k in range(start, end) if "padding_idx" not in options or indices[k] != padding]
            total = sum((s.E[indices[k]] * (s.w[k] if weighted else 1) for k in kept), 0 * s.E[0])
            rows.append(total / max(len(kept), 1) if options["mode"] == "mean" else total)
        return torch.tanh(torch.stack(rows))

    parts, target = {"E": (5, 3), **({"w": (6,)} if weighted else {})}, draw(4, 3, seed=7)
    found = hk.hessian(Formula(bags, **parts), indices, target)
    assert error(found.matrix, reverse_over_reverse(Formula(written, **parts), indices, target, mse)) <= 1e-12
    assert found.fallbacks == ()


CASTS = {
    "to single": lambda y: y.float().sin().double(),
    "log_softmax in single": lambda y: y.log_softmax(-1, dtype=torch.float32).type_as(y),
    "mean in single": lambda y: y.mean(1, dtype=torch.float32).double(),
    "cumsum in single": lambda y: y.cumsum(1, dtype=torch.float32).double(),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_round_and_need_no_automatic_differentiation(name):
    check_closed_form(CASTS[name], Cast, tolerance=1e-5)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_weight_norm(dim):
    """Torch's own second derivative of ``_weight_norm`` is wrong; the reference writes it out."""
    axes, shape = {0: (1, (4, 1)), 1: (0, (1, 3)), -1: ((0, 1), ())}[dim]
    fused = Formula(lambda s, x: torch.tanh(F.linear(x, torch._weight_norm(s.v, s.g, dim))), v=(4, 3), g=shape)
    written_out = Formula(
        lambda s, x: torch.tanh(F.linear(x, s.v * (s.g / s.v.square().sum(axes, keepdim=True).sqrt()))), v=(4, 3), g=shape
    )
    x, target = draw(5, 3, seed=4), draw(5, 4, seed=5)
    found = hk.hessian(fused, x, target)
    assert error(found.matrix, reverse_over_reverse(written_out, x, target, mse)) <= 1e-13
    assert found.fallbacks == ()


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_products_of_groups():
    def written_out(s, x):
        y = torch.tanh(x @ s.V)
        return torch.cat([y[:2] @ s.W[0], y[2:] @ s.W[2]])

    ends, shapes = torch.tensor([2, 2, 5], dtype=torch.int32), {"V": (8, 8), "W": (3, 8, 16)}
    grouped = Formula(lambda s, x: torch._grouped_mm(torch.tanh(x @ s.V), s.W, offs=ends), **shapes).float()
    x, target = draw(5, 8), draw(5, 16, seed=6)
    found = hk.hessian(grouped, x.float(), target.float())
    assert found.fallbacks == ()
    assert error(found.matrix, hk.hessian(Formula(written_out, **shapes), x, target).matrix) <= 1e-5


OTHER, WEIGHT = draw(2, 3, 4, seed=13), draw(4, seed=11).abs()
SHARES, LABELS = OTHER.softmax(-1), torch.tensor([[1, 0, 3], [2, -100, 1]])

LOSSES = {
    "cross_entropy, weighted": lambda y: F.cross_entropy(y.flatten(0, 1), LABELS.flatten(), WEIGHT, label_smoothing=0.1),
    "cross_entropy, ignoring": lambda y: F.cross_entropy(y.mT, LABELS.clamp(0), ignore_index=1, label_smoothing=0.2),
    "cross_entropy, summed": lambda y: F.cross_entropy(y.mT, LABELS, reduction="sum", label_smoothing=0.1),
    "cross_entropy, each": lambda y: F.cross_entropy(y.mT, LABELS, WEIGHT, reduction="none", label_smoothing=0.1),
    "cross_entropy, classes in the middle": lambda y: F.cross_entropy(y.mT, LABELS),
    "cross_entropy of one": lambda y: F.cross_entropy(y[0, 0], LABELS[0, 0], WEIGHT),
    "cross_entropy, probabilities": lambda y: F.cross_entropy(y.mT, SHARES.mT, WEIGHT, label_smoothing=0.1),
    "cross_entropy, moving probabilities": lambda y: F.cross_entropy(y[0], y[1].softmax(-1)),
    "cross_entropy, probabilities, each": lambda y: F.cross_entropy(y.mT, SHARES.mT, reduction="none"),
    "nll_loss": lambda y: F.nll_loss(y.flatten(0, 1), LABELS.flatten(), WEIGHT),
    "nll_loss, each": lambda y: F.nll_loss(y.mT, LABELS, reduction="none"),
    "kl_div": lambda y: F.kl_div(y.log_softmax(-1), SHARES, reduction="batchmean"),
    "kl_div, logarithms": lambda y: F.kl_div(y, y.log_softmax(1), log_target=True, reduction="none"),
    "kl_div, moving target": lambda y: F.kl_div(y, y.softmax(-1), reduction="sum"),
    "binary_cross_entropy": lambda y: F.binary_cross_entropy(y.sigmoid(), SHARES, WEIGHT),
    "binary_cross_entropy, logits": lambda y: F.binary_cross_entropy_with_logits(y, SHARES, WEIGHT, pos_weight=WEIGHT.exp()),
    "huber": lambda y: F.huber_loss(y, OTHER, delta=0.7),
    "smooth_l1": lambda y: F.smooth_l1_loss(y, OTHER, beta=0.7, reduction="sum"),
    "smooth_l1 without a bend": lambda y: F.smooth_l1_loss(y, OTHER, beta=0.0, reduction="none"),
    "l1": lambda y: F.l1_loss(y, OTHER),
    "gaussian_nll": lambda y: F.gaussian_nll_loss(y, OTHER, SHARES),
    "poisson_nll": lambda y: F.poisson_nll_loss(y, SHARES),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name):
    check_closed_form(LOSSES[name])


SEQUENCE = draw(3, 4)


class Recurrent(nn.Module):
    """A recurrent layer over sequences, whole or of unequal lengths."""

    def __init__(self, kind: type[nn.RNNBase], *, packed: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.packed = kind(4, 2, batch_first=True, **options).double(), packed

    def forward(self, x: Tensor) -> Tensor:
        """Return the states, (2, L, .)."""
        sequences = torch.stack([x, 2 * x])
        if not self.packed:
            return self.net(sequences)[0]
        return pad_packed_sequence(self.net(pack_padded_sequence(sequences, [3, 2], batch_first=True))[0], batch_first=True)[0]


class Cells(nn.Module):
    """A loop over the steps of a sequence."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = kind(4, 2, **options).double()

    def forward(self, x: Tensor) -> Tensor:
        """Return all that the last step keeps, (2, .)."""
        state = self.cell(torch.stack([x[0], 2 * x[0]]))
        for step in x[1:]:
            state = self.cell(torch.stack([step, 2 * step]), state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


RECURRENT = {
    "GRU cell": Cells(nn.GRUCell),
    "LSTM cell": Cells(nn.LSTMCell, bias=False),
    "tanh cell": Cells(nn.RNNCell),
    "relu cell": Cells(nn.RNNCell, nonlinearity="relu", bias=False),
    "GRU": Recurrent(nn.GRU),
    "LSTM": Recurrent(nn.LSTM),
    "tanh": Recurrent(nn.RNN),
    "relu": Recurrent(nn.RNN, nonlinearity="relu"),
    "two layers, both directions": Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "projected, without bias": Recurrent(nn.LSTM, proj_size=1, bias=False),
    "packed GRU": Recurrent(nn.GRU, packed=True),
    "packed LSTM": Recurrent(nn.LSTM, packed=True),
}


def nonlinear(z: Tensor, _: Any = None) -> Tensor:
    """A nonlinear loss."""
    return (z + 0.3).square().sum() / 2 + z.pow(3).sum() / 10


@pytest.mark.parametrize(("k", "name"), enumerate(RECURRENT))
def test_recurrent_layers_are_differentiated_by_their_steps(k: int, name: str) -> None:
    module = RECURRENT[name]
    expected = reverse_over_reverse(module, SEQUENCE, draw(1), nonlinear)
    found = assert_readings(expected, module, SEQUENCE, draw(1), readings=in_turn(k), loss=nonlinear)["hessian"]
    assert set(found.fallbacks) <= {"aten._pad_packed_sequence.default"}
