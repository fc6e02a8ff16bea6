"""check(): what it says of good blocks, of broken references, and how it prints."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hessiankit as hk
from hessiankit.verify.comparison import probe_directions
from hessiankit.verify.formulas import formula_errors
from hessiankit.verify.problem import Problem


def block(**options: object) -> hk.TransformerBlock:
    torch.manual_seed(0)
    return hk.TransformerBlock(d_model=4, d_ff=5, d_k=2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "attention_bias": True},
        {"placement": "pre", "norm": "rmsnorm", "activation": "silu"},
        {"n_heads": 2, "causal": True, "activation": "gelu_tanh"},
        {"affine": False, "activation": "tanh"},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_blocks_pass(options: dict[str, object], loss: str) -> None:
    report = hk.check(block(**options), loss=loss)
    assert report, report
    assert len(report.healthy_groups) >= 2


def test_the_defect_of_torch_is_named() -> None:
    health = {h.reference: h for h in hk.check(block()).health}
    if health["torch.func.hessian"].healthy:
        pytest.skip("this torch differentiates layer_norm correctly by jacfwd(jacrev)")
    for name in ("torch.func.hessian", "curvlinops"):
        assert "not symmetric" in health[name].reason
        assert "norm_" in health[name].reason
        assert health[name].symmetry_error > 1e-3
    assert health["reverse-over-reverse"].healthy
    assert health["central-differences"].healthy


def test_rows_of_unhealthy_references_do_not_count() -> None:
    report = hk.check(block())
    healthy = {h.reference for h in report.health if h.healthy}
    assert {row.reference for row in report.rows} <= healthy | {"vec_r"}
    pairs = {row.name for row in report.rows if row.reference == "reverse-over-reverse"}
    assert len(pairs) == 9 * 10 / 2


def test_printing_and_export() -> None:
    report = hk.check(block())
    text = repr(report)
    assert "attention.W_Q x attention.W_K" in text
    assert "UNHEALTHY" in text or all(h.healthy for h in report.health)
    assert text.rstrip().splitlines()[-1].startswith("PASSED")
    assert report._repr_html_().startswith("<table><caption>PASSED")
    again = json.loads(json.dumps(report.to_dict()))
    assert again["passed"] is True
    assert again["rows"][0].keys() == {"name", "reference", "max_rel_error", "passed", "seconds"}


def test_same_seed_same_digits() -> None:
    one, two = (hk.check(block(), seed=3).to_dict() for _ in range(2))
    assert [row["max_rel_error"] for row in one["rows"]] == [row["max_rel_error"] for row in two["rows"]]


def test_directions_see_what_every_entry_sees() -> None:
    whole, some = hk.check(block(), directions=0), hk.check(block(), directions=2)
    assert whole.comparison == "every entry"
    assert some.comparison == "2 generic directions a parameter"
    assert whole
    assert some


def test_float32_is_checked_at_its_own_tolerance() -> None:
    report = hk.check(block(), dtype=torch.float32, directions=2)
    assert report.rtol == 1e-3
    assert report, report


def test_a_module_of_the_user() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    report = hk.check(module, torch.randn(5, 3), torch.randn(5, 2))
    assert report, report
    assert report.hessian.fallbacks == ()


def test_an_operation_without_a_chapter_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sinc(self.inner(x))

    torch.manual_seed(0)
    report = hk.check(Odd(), torch.randn(5, 3), torch.randn(5, 2))
    assert report
    assert "aten.sinc.default" in report.hessian.fallbacks
    assert "aten.sinc.default" in repr(report)


@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "gelu"}, {"causal": True, "affine": False}], ids=str)
def test_formulas_of_the_chapters_agree_with_the_fast_path(options: dict[str, object]) -> None:
    errors = formula_errors(block(**options).double(), seed=1)
    assert len(errors) >= 15
    assert max(errors.values()) < 1e-11


def test_formulas_say_where_they_are_not_written() -> None:
    assert formula_errors(block(placement="pre").double(), seed=1) == {}


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
    assert report.remarks == ()


def test_a_wider_tolerance_says_why() -> None:
    class Lowered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).float().tanh().to(x.dtype)

    torch.manual_seed(0)
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    report = hk.check(Lowered(), x, target)
    assert report, report
    assert report.rtol == 1e-3
    assert "(tolerance 1e-03, as float computes in torch.float32, " in report.verdict
    assert "as float" not in hk.check(Lowered(), x, target, rtol=1e-3).verdict


def test_directions_are_no_weights_of_the_same_seed() -> None:
    """A direction along a weight is not generic: a map that is homogeneous in the weight has a product of zero there."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.randn(2, 3, generator=generator, dtype=torch.float64))
    V, _ = probe_directions(Problem(module, torch.ones(1, 3).double(), torch.ones(1, 2).double()), 2, seed=0)
    weight = module.weight.detach().reshape(-1)
    assert float((V @ weight / weight.norm()).abs().max()) < 0.99
