"""Identities: which are found on which module, that right derivatives fulfil them and wrong ones do not, and no false alarm."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, cross_entropy, draw, mse, randomised, reverse_over_reverse
from model_zoo import generic
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit as hk
from hessiankit.verify.identities import IdentityReport, confirmed, identities
from hessiankit.verify.problem import Problem
from hessiankit.verify.symmetries import Leg, Motion, Symmetry

X, TARGET = draw(2, 3, 6), draw(2, 3, 6, seed=7)


def block(**options: Any) -> nn.Module:
    return generic(hk.TransformerBlock(6, 5, **{"n_heads": 2, **options}))


def of_module(module: nn.Module, *data: Any, **options: Any) -> IdentityReport:
    """Return the report of a module and its closed-form Hessian."""
    H = hk.hessian(module, *data, **options)
    params = {name: p.detach() for name, p in module.named_parameters() if name in H.slices}
    return identities(Problem(module, *data, options.get("loss", "mse"), params), H.matrix, rtol=1e-10)


def found(report: IdentityReport) -> set[tuple[str, str]]:
    assert report, report
    assert report.max_rel_error <= 1e-12
    return {
        (row.family, re.sub(r"\b(attention|feedforward|self_attn|blocks|attn|h\.0)\.|model\.transformer\.", "", row.name))
        for row in report.rows
    }


def means(*names: str) -> set[tuple[str, str]]:
    return {("row mean", name) for name in names}


def maps(*pairs: str) -> set[tuple[str, str]]:
    return {("linear maps", pair) for pair in pairs}


INSIDE = maps("W_V, b_V | W_O", "W_1, b_1 | W_2") | {("logits", "W_Q, b_Q | W_K"), ("no effect", "b_K")}
"""What stays inside a branch."""
FUSED = "in_proj_weight, in_proj_bias"
IDS, NEXT = torch.tensor([[0, 1, 2], [3, 1, 0]]), torch.tensor([[0, 1, 2], [2, 2, 1]])
WIDE, WIDE_TARGET = draw(2, 3, 8), draw(2, 3, 8, seed=7)


def linear_norm() -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, eps=0.0), nn.Linear(4, 2)))


def summed(outputs: Tensor, target: Tensor) -> Tensor:
    return outputs.sum()


WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any], set[tuple[str, str]]]] = {
    # the module, its inputs and target, options, and all identities
    "post-norm: only writes between two LayerNorms": (
        lambda: block(bias=True, attention_bias=True), (X, TARGET), {}, INSIDE | means("W_O", "b_O", "W_2", "b_2"),
    ),
    "pre-norm: the stream itself is read in the end": (
        lambda: block(placement="pre", bias=True, attention_bias=True), (X, TARGET), {},
        INSIDE | maps("norm_1.weight, norm_1.bias | W_Q, W_K, W_V", "norm_2.weight, norm_2.bias | W_1"),
    ),
    "torch's encoder layer with its fused projection": (
        lambda: generic(nn.TransformerEncoderLayer(6, 2, 5, batch_first=True)), (X, TARGET), {},
        maps(f"{FUSED} | out_proj.weight", "linear1.weight, linear1.bias | linear2.weight")
        | means(*(f"{part}.{kind}" for part in ("out_proj", "linear2") for kind in ("weight", "bias")))
        | {("logits", f"{FUSED} | in_proj_weight"), ("no effect", "in_proj_bias")},
    ),
    "rows of a table into a norm": (
        lambda: randomised(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4, eps=0.0), nn.Linear(4, 3))),
        (IDS, NEXT), {"loss": "cross_entropy"},
        {("norm scale", "0.weight")} | means("0.weight", "2.weight", "2.bias") | maps("1.weight, 1.bias | 2.weight"),
    ),

    "a fixed bias leaves shifts only": (
        linear_norm, (draw(5, 3), draw(5, 2)), {"params": ["0.weight", "2.weight"]}, means("0.weight"),
    ),

    "a bias without effect is named once": (
        lambda: Formula(lambda s, x: x @ s.W + (s.b - s.b), W=(4, 3), b=(3,)), (draw(5, 4), draw(5, 3)), {}, {("no effect", "b")},
    ),
    "none": (lambda: randomised(nn.Sequential(nn.Linear(6, 3), nn.Tanh())), (X, draw(2, 3, 3)), {}, set()),
    "tied weights": (lambda: Formula(lambda s, x: (x @ s.W).relu() @ s.W.T, W=(4, 5)), (draw(7, 4), draw(7, 4, seed=2)), {}, set()),
    "a faint effect is no symmetry": (
        lambda: Formula(lambda s, x: x @ s.A @ s.C + 1e-9 * torch.tanh(x @ s.A).sum(-1, keepdim=True), A=(4, 3), C=(3, 2)),
        (draw(7, 4), draw(7, 2)), {}, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_all_identities_of_a_module(name: str) -> None:
    build, data, options, expected = WHOLE[name]
    report = of_module(build(), *data, **options)
    assert found(report) == expected
    assert expected or report.verdict == "no identity applies to this module"


BLOCK = (X, TARGET, {})
PARTLY: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], set[tuple[str, str]], set[tuple[str, str]]]] = {
    # the module, its inputs, target and options, identities that it has, and identities that it has not
    "gelu is not homogeneous": (lambda: block(activation="gelu"), BLOCK, maps("W_V | W_O"), maps("W_1 | W_2")),

    **{
        f"weights into norms of {scope} with eps 0": (
            lambda scope=scope: block(placement="hybridnorm", norm="rmsnorm", eps=0.0, norm_scope=scope), BLOCK,
            {("norm scale", name) for name in ("W_Q", "W_K", "W_V")} | {("logits", "norm_q.weight | norm_k.weight")},
            {("logits", "W_Q | W_K")},
        )
        for scope in ("head", "full")
    },
    "grouped queries and a gate": (
        lambda: generic(hk.TransformerBlock(8, 5, n_heads=4, n_kv_heads=2, placement="pre", norm="rmsnorm", activation="swiglu")),
        (WIDE, WIDE_TARGET, {}), maps("norm_2.weight | W_1, W_G", "W_1 | W_2"), set(),
    ),
    "rotary positions": (
        lambda: generic(hk.TransformerBlock(8, 5, n_heads=4, placement="pre", attention_bias=True, rotary=True)),
        (WIDE, WIDE_TARGET, {}), set(), {("logits", "W_Q, b_Q | W_K"), ("logits", "W_Q | W_K"), ("no effect", "b_K")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTLY)
def test_identities_of_parts(name: str) -> None:
    build, (x, target, options), has, has_not = PARTLY[name]
    names = found(of_module(build(), x, target, **options))
    assert has <= names
    assert not has_not & names
    assert name != "rotary positions" or not {"logits", "no effect"} & {family for family, _ in names}


# That they hold for derivatives of another origin, and for no wrong ones ------------------------------------------------------


CASES = {
    "post": (block(bias=True, attention_bias=True), X, TARGET, "mse"),
    "qkv norms": (block(placement="pre-qkv-pre", norm="rmsnorm", eps=0.0), X, TARGET, "mse"),
    "classes": (
        randomised(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))),
        draw(7, 4),
        torch.tensor([0, 1, 2, 2, 1, 0, 0]),
        "cross_entropy",
    ),
}


@functools.cache
def example(name: str) -> tuple[Problem, Tensor]:
    module, x, target, loss = CASES[name]
    reference = reverse_over_reverse(module, x, target, {"mse": mse, "cross_entropy": cross_entropy}[loss])
    return Problem(module, x, target, loss), reference


@pytest.mark.parametrize("name", CASES)
def test_reverse_over_reverse_fulfils_them_and_one_wrong_entry_of_a_block_is_seen(name: str) -> None:
    problem, H = example(name)
    right = identities(problem, H, rtol=1e-12)
    assert right, right
    assert len(right.rows) >= 2
    for row in right.rows:
        moving = row.name.replace(" | ", ", ").split(", ")[0]
        at = problem.slices[moving].start
        wrong = H.clone()
        wrong[-1, at] += 1e-6 * H.abs().max()
        wrong[at, -1] = wrong[-1, at]
        after = {r.statement + r.name: r for r in identities(problem, wrong, rtol=1e-10).rows}
        assert not after[row.statement + row.name].passed, row


def test_a_scaled_block_is_seen() -> None:
    problem, H = example("post")
    q, k = problem.slices["attention.W_Q"], problem.slices["attention.W_K"]
    wrong = H.clone()
    wrong[q, k] *= 1.01
    wrong[k, q] *= 1.01
    report = identities(problem, wrong, rtol=1e-10)
    assert [row.family for row in report.rows if not row.passed] == ["logits"]
    assert report.verdict.startswith("FAILED: 1 of 8 identities; the worst is logits of attention.W_Q")
    assert "FAIL" in report.table()


def test_a_hessian_of_nan_is_seen() -> None:
    problem, H = example("classes")
    assert not any(row.passed for row in identities(problem, H * float("nan"), rtol=1e-10).rows)


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, H = example("post")
    right = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: tuple(1.001 * g for g in right(*a, **k)))
    failed = [row.family for row in identities(problem, H, rtol=1e-10).rows if not row.passed]
    assert failed.count("linear maps") == 2
    assert "logits" in failed


# That a structure is believed only where the loss confirms it ------------------------------------------------------------------


def test_a_symmetry_at_special_values_is_no_symmetry() -> None:
    """Rotating what an RMS norm reads keeps sum y^4 nowhere, sum y^2 only while the gain is constant."""
    module = Formula(lambda s, x: F.rms_norm(x @ s.W, (3,), s.gamma, 1e-5).square(), W=(4, 3), gamma=(3,))
    with torch.no_grad():
        module.gamma.fill_(1.0)
    problem = Problem(module, draw(5, 4), None, summed)
    G = draw(3, 3)
    motion = Motion(((Leg("W", 1, 0, 3), G - G.T),))
    assert abs(problem.near(motion.moved(problem.params, 0.7)).value - problem.value) < 1e-13
    assert confirmed(problem, [Symmetry("linear maps", "", ("W",), (), (motion,))], torch.Generator().manual_seed(1)) == []
    assert of_module(module, draw(5, 4), draw(5, 3), loss=summed).rows == ()


def test_a_stopped_gradient_has_no_identities() -> None:
    """The gradient in W vanishes everywhere, and the loss does not change with W, but H holds what is detached."""
    module = Formula(lambda s, x: torch.cat([x @ s.V, x @ s.W - (x @ s.W).detach()], -1), V=(4, 2), W=(4, 2))
    target = torch.cat([draw(5, 2), torch.zeros(5, 2)], -1)
    assert float(hk.hessian(module, draw(5, 4), target).block("W", "W").abs().max()) > 0.1
    assert of_module(module, draw(5, 4), target).rows == ()


# The parts ---------------------------------------------------------------------------------------------------------------------
