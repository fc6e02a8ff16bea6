"""check(): what it says of good blocks, of broken references, and how it prints."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, randomised
from reference_cases import HandWrittenNorm
from torch import nn

import hessiankit as hk
from derivations.normalization import RMSNormAt
from hessiankit.verify.check import INDEPENDENT, REFERENCES_OF_BLOCKS
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.identities import IdentityReport, identities
from hessiankit.verify.probes import probe_directions
from hessiankit.verify.problem import Problem


def block(**options: object) -> hk.TransformerBlock:
    torch.manual_seed(0)
    return hk.TransformerBlock(d_model=4, d_ff=5, d_k=2, **options)  # type: ignore[arg-type]


@functools.cache
def plain() -> CheckReport:
    """Return the report of the post-norm block, which many tests read."""
    return hk.check(block())


class Derivative(nn.Module):
    """A network and its derivative in the inputs, by transforms of torch.func, as in physics-informed losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.jacrev(self.net))(x).square().mean() + self.net(x).mean()


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(7, 3, **options), nn.Linear(3, 2)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.bags(*inputs).tanh())


X, LABELS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0, 1, 0])
TOKENS, OFFSETS = torch.tensor([0, 1, 2, 3, 4, 4, 6, 2]), torch.tensor([0, 2, 3, 3])
CLASSES = {"loss": "cross_entropy"}
PASS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "a pre-norm block": (lambda: block(placement="pre", norm="rmsnorm", activation="silu"), (), CLASSES),
    "two heads, causal": (lambda: block(n_heads=2, causal=True, activation="gelu_tanh"), (), {}),
    "norms without gain": (lambda: block(affine=False, bias=True, causal=True, activation="tanh"), (), CLASSES),
    "transforms of torch.func in forward": (Derivative, (X,), {"loss": None}),
    "bags of embeddings with padding": (lambda: Bags(padding_idx=4), ((TOKENS, OFFSETS), X[:4, :2]), {}),
    "weighted sums of embeddings": (lambda: Bags(mode="sum"), ((TOKENS, OFFSETS, torch.linspace(-1, 1, 8)), X[:4, :2]), {}),
    **{
        f"gated units in {kind}": (
            lambda kind=kind: nn.Sequential(nn.Linear(3, 8), nn.GLU(), nn.Linear(4, 2)).to(kind),
            (X.to(kind), LABELS),
            {**CLASSES, "dtype": None},
        )
        for kind in (torch.bfloat16, torch.float32)
    },
}


@pytest.mark.parametrize("name", PASS)
def test_modules_pass(name: str) -> None:
    build, data, options = PASS[name]
    torch.manual_seed(0)
    report = hk.check(build(), *data, **options)
    assert report, report
    assert len(report.healthy_groups) >= 2


def test_the_defect_of_torch_and_curvlinops_is_named() -> None:
    health = {h.reference: h for h in plain().health}
    if health["torch.func.hessian"].healthy:
        pytest.skip("this torch differentiates layer_norm correctly by jacfwd(jacrev)")
    for name in ("torch.func.hessian", *(["curvlinops"] if find_spec("curvlinops") else [])):
        assert "not symmetric" in health[name].reason
        assert "norm_" in health[name].reason
    assert health["reverse-over-reverse"].healthy
    assert health["central-differences"].healthy


def test_rows_printing_and_export() -> None:
    """Rows of unhealthy references do not count; the table and the JSON say what was found."""
    report = plain()
    assert report, report
    healthy = {h.reference for h in report.health if h.healthy}
    assert {row.reference for row in report.rows} <= healthy | {"vec_r", "the module", "hessian", "differences of the loss"}
    pairs = {row.name for row in report.rows if row.reference == "reverse-over-reverse" and " x " in row.name}
    assert len(pairs) == 9 * 10 / 2
    text = report.table()
    assert "attention.W_Q x attention.W_K" in text
    assert "UNHEALTHY" in text or all(h.healthy for h in report.health)
    assert text.rstrip().splitlines()[-1].startswith("PASSED")
    assert report._repr_html_().startswith("<table><caption>PASSED")
    again = json.loads(json.dumps(report.to_dict()))
    assert again["passed"] is True
    assert {row["method"] for row in again["rows"]} == {"float64"}
    assert again["identities"]["passed"] is True
    same = hk.check(block(), formulas=False)  # the same seed gives the same digits
    errors = {(row.name, row.reference): row.max_rel_error for row in report.rows}
    assert {(row.name, row.reference): row.max_rel_error for row in same.rows}.items() <= errors.items()


def test_three_independent_references_and_others_by_name() -> None:
    torch.manual_seed(0)
    module, x, target = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double(), torch.randn(5, 3), torch.randn(5, 4)
    assert tuple(h.reference for h in hk.check(module, x, target).health) == INDEPENDENT
    report = hk.check(module, x, target, against=REFERENCES_OF_BLOCKS)
    assert tuple(h.reference for h in report.health) == REFERENCES_OF_BLOCKS
    assert bool(report) is (len(report.healthy_groups) >= 2)
    assert tuple(h.reference for h in plain().health) == REFERENCES_OF_BLOCKS  # hessiankit's own block shows the known defect


def test_another_forward_mode_is_taken_where_torch_has_none_of_the_gradient() -> None:
    report = hk.check(nn.Linear(3, 4).double(), torch.randn(5, 3), torch.randn(5, 4), loss=nn.functional.mse_loss)
    if any(h.reference == "jvp(grad)" and h.healthy for h in report.health):
        pytest.skip("this torch takes jvp(grad) through mse_loss")
    assert {h.reference for h in report.health if h.healthy} == {*INDEPENDENT, "torch.func.hessian"} - {"jvp(grad)"}


def test_a_batched_sweep_that_is_wrong_is_not_counted() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(2, 4, 1, bias=False), nn.GroupNorm(4, 4, affine=False)).double()
    report = hk.check(module, torch.randn(2, 2, 4), torch.randn(2, 4, 4))
    assert report, report
    assert {h.reference for h in report.health if h.healthy} >= {"jvp(grad)", "central-differences"}


def test_one_reference_is_unconfirmed_and_not_unhealthy() -> None:
    module = nn.Linear(2, 1)
    report = hk.check(module, torch.ones(3, 2), torch.zeros(3, 1), against=["reverse-over-reverse"])
    assert not report
    assert "reverse-over-reverse alone" in report.verdict
    assert "unconfirmed: no other independent reference" in report.table()
    assert "UNHEALTHY" not in report.table()


def test_a_block_of_zeros_has_no_relative_error() -> None:
    """The bias under the keys' norm moves all logits of a row alike: its blocks vanish, up to rounding or exactly."""
    torch.manual_seed(0)
    report = hk.check(hk.TransformerBlock(d_model=4, d_ff=5, placement="hybridnorm"), formulas=False)
    assert report, report
    assert report.max_rel_error < report.rtol
    assert "within its own error" not in report.verdict
    of_keys = [row for row in report.rows if " x " in row.name and "norm_k.bias" in row.name]
    assert len(of_keys) == 13 * len(report.references)
    assert {row.zero for row in of_keys} <= {"0 (exact)", "0 to rounding"}
    assert all(row.passed and row.shown == row.zero and row.max_rel_error == 0.0 for row in of_keys)
    assert not any(row.zero for row in report.rows if " x " in row.name and "norm_k.bias" not in row.name)
    assert report.table().startswith("TransformerBlock, loss mse, inputs 2 x 3 x 4, float64, seed 0 and inputs and target drawn")


def test_exact_rows_stand_beside_those_of_floating_point(monkeypatch: pytest.MonkeyPatch) -> None:
    module = block(placement="pre", norm="rmsnorm", affine=False)
    report = hk.check(module, exact=True, formulas=False)
    assert report, report
    assert [row.method for row in report.exact] == ["modular"]
    assert report.verdict.endswith(f"; {sum(row.entries for row in report.exact)} entries equal in exact arithmetic")
    for text in (report.table(), report._repr_html_()):
        assert "pre: rmsnorm, relu, 1 head, no gains" in text
        assert "exact modular" in text
    right = RMSNormAt.hessian
    monkeypatch.setattr(RMSNormAt, "hessian", lambda at, i, j: -right(at, i, j))
    report = hk.check(module, exact=True, formulas=False)
    assert not report
    assert report.verdict.startswith("FAILED: the references agree, but a formula is wrong in exact arithmetic. placements: pre")
    assert all(row.passed for row in report.rows)


def test_exact_rows_need_a_block() -> None:
    with pytest.raises(hk.InputError, match=r"exact=True is about hessiankit\.TransformerBlock, and a Linear holds none"):
        hk.check(nn.Linear(3, 2), torch.randn(5, 3), torch.randn(5, 2), exact=True)


def test_directions_see_what_every_entry_sees() -> None:
    some = hk.check(block(), directions=2, formulas=False)
    assert (plain().comparison, some.comparison) == ("every entry", "2 generic directions a parameter")
    assert some, some


@pytest.mark.parametrize(
    ("sizes", "reference"),
    [((6, 3), "central-differences"), ((150, 134), "reverse-over-reverse")],  # beyond 20,000 parameters there is no matrix
    ids=["a matrix", "products"],
)
def test_every_direction_that_is_asked_for_is_compared(sizes: tuple[int, int], reference: str) -> None:
    """The reference calls the module for each."""

    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counted.calls += 1
            return torch.tanh(super().forward(x))

    torch.manual_seed(0)
    module = Counted(*sizes).double()
    x, target = torch.randn(4, sizes[0]).double(), torch.randn(4, sizes[1]).double()
    counts = []
    for directions in (1, 2, 3, 4):
        Counted.calls = 0
        report = hk.check(module, x, target, against=[reference], directions=directions)
        assert report.comparison.startswith((f"{directions} generic", f"products in {directions} generic"))
        counts.append(Counted.calls)
    steps = [more - fewer for fewer, more in pairwise(counts)]
    assert min(steps) > 0.5 * max(steps), counts


def test_an_operation_without_a_closed_form_is_named() -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sinc(super().forward(x))

    torch.manual_seed(0)
    report = hk.check(Odd(3, 2), torch.randn(5, 3), torch.randn(5, 2))
    assert report
    assert "aten.sinc.default" in report.hessian.fallbacks
    assert "aten.sinc.default" in report.table()


def test_an_embedding_that_reads_its_padding_is_named() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 3, padding_idx=-5), nn.Linear(3, 2), nn.Tanh())
    with torch.no_grad():
        module[0].weight[0] = 1.0  # type: ignore[operator]
    report = hk.check(module, torch.tensor([[0, 1, 2], [3, 0, 4]]), torch.randn(2, 3, 2))
    assert not report
    assert "an embedding reads its padding_idx" in report.verdict
    report = hk.check(module, torch.tensor([[4, 1, 2], [3, 1, 4]]), torch.randn(2, 3, 2))
    assert report
    assert not any("padding_idx" in remark for remark in report.remarks)


def test_a_wider_tolerance_says_why() -> None:
    class Lowered(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float().tanh().to(x.dtype)

    torch.manual_seed(0)
    lowered, x, target = Lowered(3, 2), torch.randn(5, 3), torch.randn(5, 2)
    report = hk.check(lowered, x, target)
    assert report, report
    assert report.rtol == 1e-3
    assert "(tolerance 1e-03, as float computes in torch.float32, " in report.verdict
    assert "as float" not in hk.check(lowered, x, target, rtol=1e-3).verdict


def test_directions_are_no_weights_of_the_same_seed() -> None:
    """A direction along a weight is not generic: a map that is homogeneous in the weight has a product of zero there."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.randn(2, 3, generator=generator, dtype=torch.float64))
    V, *_ = probe_directions(Problem(module, torch.ones(1, 3).double(), torch.ones(1, 2).double()), 2, seed=0)
    weight = module.weight.detach().reshape(-1)
    assert float((V @ weight / weight.norm()).abs().max()) < 0.99


def test_identities_are_part_of_the_report() -> None:
    report = hk.check(block(bias=True, attention_bias=True), formulas=False)
    assert {row.family for row in report.identities.rows} == {"linear maps", "logits", "row mean", "no effect"}
    assert "identities to" in report.verdict
    assert "attention.W_Q, attention.b_Q | attention.W_K" in report.table()
    assert "H = 0 in the rows of A" in report._repr_html_()


def test_an_identity_that_does_not_hold_fails_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(problem: Problem, H: torch.Tensor, **options: object) -> IdentityReport:
        wrong = H.clone()
        wrong[problem.slices["feedforward.W_1"]] *= 1.01
        return identities(problem, wrong, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules[hk.check.__module__], "identities", mistaken)
    report = hk.check(block(), formulas=False)
    assert not report
    assert all(row.passed for row in report.rows)
    assert report.verdict.startswith("FAILED: the references agree, but an exact identity does not hold. FAILED: ")
    assert report.to_dict()["identities"]["passed"] is False


class Cut(nn.Module):
    """Attention as some libraries write it: a mask of the dtype's lowest number, and a softmax in single precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.W = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tensor([[True, True, True], [False, True, True], [False, False, True]])
        scores = (x @ self.W @ x.mT).masked_fill(hidden, torch.finfo(x.dtype).min)
        return (torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype) @ x).sum(-1)


def test_a_conversion_that_makes_the_loss_infinite_is_not_made() -> None:
    report = hk.check(Cut(), torch.randn(3, 3), torch.randn(3))
    assert report
    assert {row.method for row in report.rows if row.method} == {"float32"}
    note = "not finite in torch.float64, as where a mask of finfo.min is cast to a narrower type: compared in torch.float32"
    assert note in " ".join(report.remarks)
    with pytest.raises(hk.InputError, match="every key of that query is masked"):
        hk.check(Cut().double(), torch.randn(3, 3).double(), torch.randn(3).double())


@pytest.mark.parametrize(
    ("activation", "right"), [(nn.CELU(0.6), False), (nn.Hardsigmoid(), False), (nn.CELU(0.5), True)], ids=str
)
def test_a_gradient_of_torch_that_lost_digits_is_named(activation: nn.Module, right: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2)).double()
    report = hk.check(module, torch.randn(6, 3).double(), torch.randn(6, 2).double())
    assert bool(report) is right
    assert ("torch's own gradient is " not in report.verdict + "".join(report.remarks)) is right


@pytest.mark.parametrize(
    ("features", "samples", "raises", "threads"),
    [
        (3, 4, None, 1),
        (3, 2**14, None, 2),
        (5000, 2, None, 2),
        (3, 4, ValueError("of the module"), 1),
        (3, 4, KeyboardInterrupt(), 1),
    ],
    ids=["small", "many samples", "many parameters", "error", "Ctrl-C"],
)
def test_a_small_problem_takes_one_thread(features: int, samples: int, raises: BaseException | None, threads: int) -> None:
    before, seen = torch.get_num_threads(), set()

    class Module(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            if raises is not None:
                raise raises
            return super().forward(x)

    torch.set_num_threads(2)
    try:
        with pytest.raises(type(raises)) if raises else contextlib.nullcontext():
            assert hk.check(Module(features, 1).double(), torch.randn(samples, features), torch.randn(samples, 1))
        assert seen == {threads}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class WithItsDerivative(nn.Module):
    """A network and its derivative along the inputs, as for a Sobolev loss."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.GELU(), norm(4), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.func.jvp(self.net, (x,), (v,)), -1)


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


REVERSED = Formula(lambda m, x: Reversed.apply(x @ m.W), W=(2, 3))


@pytest.mark.parametrize(
    ("module", "data", "right"),
    [
        (WithItsDerivative(nn.LayerNorm), (draw(5, 2), draw(5, 2, seed=2)), False),  # torch: grad(jvp) through layer_norm
        (WithItsDerivative(HandWrittenNorm), (draw(5, 2), draw(5, 2, seed=2)), True),
        (REVERSED, (draw(5, 2),), False),
    ],
)
def test_a_gradient_that_is_not_the_derivative_of_the_loss_does_not_pass(module: nn.Module, data: Any, right: bool) -> None:
    report = hk.check(randomised(module), data, draw(*module(*data).shape, seed=3))
    (slope,) = (row for row in report.rows if row.name == "slope")
    assert slope.passed is report.passed is right, report
    if not right:
        assert slope.max_rel_error > 1e-2
        assert "torch's own gradient is" in report.verdict


def test_a_reversed_gradient_fails_in_single_precision() -> None:
    report = hk.check(REVERSED, draw(5, 2), draw(5, 3, seed=3), dtype=torch.float32)
    (slope,) = (row for row in report.rows if row.name == "slope")
    assert not report, report
    assert not slope.passed
    assert 1.0 < slope.max_rel_error < 3.0
