"""The bounds of a block's Hessian: never below the norm that they bound, and as tight as they claim."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from curvature_reference import mse, reverse_over_reverse, sample
from torch import nn

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS, Attention
from hessiankit.request.read import read_request
from hessiankit.support.errors import InputError
from hessiankit.theory.bounding.a_priori import a_priori
from hessiankit.theory.bounding.structured import sites, structured
from papers.curvature_gap.high_precision import norm_from_below
from papers.curvature_gap.problems import BoundProblem, draw_problem

ROUNDING = 1 + 1e-9
LOSSES = {"mse": mse, "cross_entropy": lambda z, t: nn.functional.cross_entropy(z.flatten(0, -2), t.flatten())}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def task_of(problem):
    return read_request(problem.module, problem.x.unsqueeze(0), problem.target.unsqueeze(0), loss=problem.loss).only()


@pytest.mark.slow
@pytest.mark.parametrize("seed", sample(range(60), 6))
def test_no_bound_is_violated(seed):
    problem = draw_problem(seed)
    H = problem.hessian
    prior, own = a_priori(problem.module, problem.x, problem.target, loss=problem.loss), structured(task_of(problem))
    true = H.spectral_norm()
    assert true <= min(prior.whole, own.whole) * ROUNDING
    for i, j in H.pairs():
        floor = 1e-12 * true  # below it a block is rounding
        assert H.spectral_norm(i, j) <= min(prior.block(i, j), own.pairs[i, j]) * ROUNDING + floor, (i, j)


@pytest.mark.slow
@pytest.mark.parametrize("placement", sample(PLACEMENTS, 4))
def test_every_placement_has_bounds(placement):
    problem = draw_problem(100 + list(PLACEMENTS).index(placement), placement=placement)
    report = hk.bounds(problem.module, problem.x, problem.target, loss=problem.loss)
    assert not report.violated
    assert report.ratio("certified") <= ROUNDING
    assert report.values["whole"]["lower"] <= report.values["whole"]["true"] * ROUNDING


def test_labels_that_do_not_count_are_not_in_the_mean():
    attention = Attention(2).double()
    for p in attention.parameters():
        p.data.mul_(0.01)
    x, labels = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]], dtype=torch.float64), torch.tensor([[-100], [0]])
    assert not hk.bounds(attention, x, labels, loss="cross_entropy").violated


def test_sites_add_up_to_the_hessian():
    for seed in (3, 14, 27):
        problem = draw_problem(seed)
        found = sites(task_of(problem))
        total = sum(site.plus.T @ site.plus - site.minus.T @ site.minus for site in found)
        expected = reverse_over_reverse(problem.module, problem.x.unsqueeze(0), problem.target.unsqueeze(0), LOSSES[problem.loss])
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


def test_over_a_ball():
    torch.manual_seed(0)
    block = hk.TransformerBlock(4, 3, placement="pre", activation="gelu", eps=0.1).double()
    x, t, centre = normal(3, 4), normal(3, 4), copy.deepcopy(block)
    tables = [a_priori(block, x, t, radius=radius).whole for radius in (0.0, 1e-3, 0.1, 1.0)]
    assert tables == sorted(tables)
    for radius, limit in zip((1e-3, 0.1, 1.0), tables[1:], strict=True):
        for _ in range(5):
            for p, q in zip(block.parameters(), centre.parameters(), strict=True):
                step = torch.randn_like(p)
                p.data = q + radius * step / step.norm()
            assert hk.hessian(block, x[None], t[None]).spectral_norm() <= limit


def test_structured_is_tight():
    # at initialisation; a median of 4.6 was what a search with other proofs found for the post-norm block
    ratios = []
    for seed in range(7):
        torch.manual_seed(seed)
        block = hk.TransformerBlock(4, 6, d_k=2, affine=False).double()
        x, t = normal(1, 4, 4), normal(1, 4, 4)
        ratios.append(structured(read_request(block, x, t).only()).whole / hk.hessian(block, x, t).spectral_norm())
    assert min(ratios) >= 1.0
    assert sorted(ratios)[3] < 2.0


def test_report():
    torch.manual_seed(0)
    block = Attention(4, d_k=2).double()
    x, t = normal(2, 3, 4), normal(2, 3, 4)
    report = hk.bounds(block, x, t)
    found = json.loads(json.dumps(report.to_dict()))
    assert set(found["pairs"]) == {f"{i} x {j}" for i, j in hk.hessian(block, x, t).pairs()}
    for row in (found["whole"], *found["pairs"].values()):
        assert {"true", "lower", "a_priori", "structured", "certified"} <= set(row)
    assert "W_Q x W_K" in report.table()
    assert "<table>" in report._repr_html_()


def in_single(seed):
    """A problem of the generator in float32, and its twin in float64."""
    problem = draw_problem(seed)
    twin = copy.deepcopy(problem.module).float().double()
    target = problem.target.float().double() if problem.loss == "mse" else problem.target
    return copy.deepcopy(twin).float(), twin, problem.x.float().double(), target, problem.loss


@pytest.mark.parametrize("seed", [4, 18])
def test_a_float32_module_is_bounded_in_float64(seed):
    module, twin, x, t, loss = in_single(seed)
    narrow = t.float() if loss == "mse" else t
    report, wide = hk.bounds(module, x.float(), narrow, loss=loss), hk.bounds(twin, x, t, loss=loss)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert report.to_dict() == wide.to_dict()
    assert not report.violated
    H = reverse_over_reverse(twin, x.unsqueeze(0), t.unsqueeze(0), LOSSES[loss])
    assert report.values["whole"]["true"] == pytest.approx(float(torch.linalg.matrix_norm(H, 2)), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_block_that_vanishes_is_zero_to_rounding(dtype):
    """A shift of all keys by one vector adds the same number to all logits of a row, which softmax does not see."""
    torch.manual_seed(0)
    block = hk.TransformerBlock(4, 5, 2, attention_bias=True).to(dtype)
    report = hk.bounds(block, normal(3, 4).to(dtype), normal(3, 4).to(dtype))
    assert not report.violated
    row = report.values["attention.b_K x attention.b_K"]
    assert row["true"] <= report.noise < 1e-12 * report.values["whole"]["true"]
    (line,) = (line for line in report.table().splitlines() if line.strip().startswith("attention.b_K x attention.b_K"))
    assert "0 to rounding" in line
    assert " x)" not in line  # no ratio to a norm that is rounding
    assert any(line.startswith("whole ") for line in str(report).splitlines())  # of 106 rows, those that a screen holds
    assert "0 to rounding" not in next(line for line in report.table().splitlines() if line.strip().startswith("whole"))


def test_a_norm_without_eps_keeps_that_of_its_dtype():
    """Squares of 1e-8 beside torch's eps of 1.2e-7 for float32, against autograd in float64 with that eps."""
    torch.manual_seed(0)
    module, x, t = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 2)), 1e-4 * normal(3, 4).float(), normal(3, 2).float()
    twin = nn.Sequential(nn.RMSNorm(4, eps=torch.finfo(torch.float32).eps), nn.Linear(4, 2)).double()
    twin.load_state_dict(module.state_dict())
    H = reverse_over_reverse(twin, x.double().unsqueeze(0), t.double().unsqueeze(0), mse)
    report = hk.bounds(module, x, t)
    assert report.values["whole"]["true"] == pytest.approx(float(torch.linalg.matrix_norm(H, 2)), rel=1e-10)
    assert module[0].eps is None
    assert not report.violated


def test_what_the_module_itself_refuses_is_refused():
    with pytest.raises(InputError, match="float32"):
        hk.bounds(nn.Linear(3, 2).double(), torch.ones(4, 3), torch.zeros(4, 2))
    with pytest.raises(InputError, match=r"structured: the parameters are torch\.float32"):
        structured(read_request(nn.Linear(3, 2), torch.ones(4, 3), torch.zeros(4, 2)).only())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": torch.zeros(3, 4, dtype=torch.int64)}, "floating point"),
        ({"inputs": torch.full((3, 4), math.nan, dtype=torch.float64)}, "NaN"),
        ({"loss": "hinge"}, "hinge"),
    ],
)
def test_errors(change, message):
    given = {"inputs": torch.ones(3, 4).double().cumsum(0), "target": torch.zeros(3, 4).double(), **change}
    with pytest.raises(InputError, match=message):
        hk.bounds(hk.TransformerBlock(4, 3).double(), **given)


@pytest.mark.parametrize("radius", [0.0, 0.5])
def test_an_a_priori_bound_of_one_token_is_attained(radius):
    """One token attends to itself, so the output is x W_V: the block of W_V is 2/N x x^T (x) I over the whole ball."""
    attention, x, t = Attention(2).double(), torch.tensor([[3.0, 4.0]], dtype=torch.float64), normal(1, 2)
    table = a_priori(attention, x, t, radius=radius)
    assert table.block("W_V", "W_V") == pytest.approx(2 / 2 * 25, rel=1e-9)
    assert table.whole == pytest.approx(float(torch.linalg.matrix_norm(table.matrix, 2)), rel=1e-9)
    residual = float((x @ attention.W_V - t).norm().detach())
    if radius == 0:
        assert table.parts["lipschitz"] == pytest.approx(residual * 5, rel=1e-9)  # the gradient 2/N x^T R itself
    else:
        assert table.parts["lipschitz"] >= (residual + radius * 5) * 5 * (1 - 1e-9)


def test_an_a_priori_bound_of_cross_entropy_is_attained_between_two_classes():
    """Equal logits: diag(p) - p p^T has norm 1/2; and a nearly certain wrong label has a gradient of length sqrt(2)."""
    attention, x = Attention(2).double(), torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    with torch.no_grad():
        attention.W_V.zero_()
    table = a_priori(attention, x, torch.tensor([1]), loss="cross_entropy")
    true = hk.hessian(attention, x.unsqueeze(0), torch.tensor([[1]]), loss="cross_entropy").spectral_norm("W_V")
    assert table.block("W_V", "W_V") == pytest.approx(true, rel=1e-9) == pytest.approx(25 / 2, rel=1e-9)
    with torch.no_grad():
        attention.W_V.copy_(torch.tensor([[10.0, -10.0], [10.0, -10.0]]))
    loss = nn.functional.cross_entropy(attention(x), torch.tensor([1]))
    (slope,) = torch.autograd.grad(loss, attention.W_V)
    again = a_priori(attention, x, torch.tensor([1]), loss="cross_entropy")
    assert again.parts["lipschitz"] == pytest.approx(float(slope.norm()), rel=1e-9)


def test_a_norm_without_eps_needs_rows_that_vary():
    block = hk.TransformerBlock(4, 3, placement="pre", eps=0.0).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    a_priori(block, x, x)
    with pytest.raises(InputError, match="norm_1, row"):
        a_priori(block, torch.ones(3, 4, dtype=torch.float64), x)
    with pytest.raises(InputError, match="smaller radius"):
        a_priori(block, x, x, radius=1e3)


def test_a_saturated_softmax_keeps_the_digits_of_small_blocks():
    # automatic differentiation in float64 has 0.2548 (reverse over reverse) and 0.1991 (forward over reverse) here
    H = draw_problem(552156, placement="attention").hessian
    in_80_digits = 0.14579054641737  # by the referee's arithmetic, papers.curvature_gap.high_precision
    assert H.spectral_norm("W_Q", "W_Q") == pytest.approx(in_80_digits, rel=1e-12)
    assert H.spectral_norm() > 1e4


def test_a_norm_of_two_entries_keeps_the_digits_of_its_slopes():
    # 1 - x^2 for eps r^2 is 9e-6 off in the Hessian here, and a bound exceeded by 7e-6
    torch.manual_seed(0)
    block, x = hk.TransformerBlock(2, 3, activation="gelu", eps=1e-8, affine=False).double(), 1e4 * normal(2, 2)
    with torch.no_grad():
        block.feedforward.W_2 *= 1e2
    problem = BoundProblem(0, "post", "", block, x, 0 * x, "mse")
    H, name = problem.hessian, "feedforward.W_2"
    rows, vector = H.slices[name], torch.linalg.svd(H.block(name, name)).Vh[0]
    true = norm_from_below(problem, rows, rows, vector)
    assert H.spectral_norm(name, name) == pytest.approx(true, rel=1e-12)
    assert true <= structured(task_of(problem)).pairs[name, name] < true * (1 + 1e-6)


def test_a_curvature_whose_square_underflows_is_below_its_bound():
    torch.manual_seed(0)
    block, x = hk.TransformerBlock(2, 3, activation="gelu").double(), normal(3, 2)
    with torch.no_grad():
        block.norm_2.weight.fill_(250.0)
    report = hk.bounds(block, x, block(x).argmax(1), loss="cross_entropy")
    assert 0 < report.values["whole"]["true"] < 1e-180
    assert not report.violated


def test_the_rounding_of_eigenvectors_is_part_of_a_structured_bound():
    # without it this block, 2e-5 of the whole, is above its bound by 2e-6 of itself
    problem, name = draw_problem(3001331), "norm_1.bias"
    norm, bound = problem.hessian.spectral_norm(name, name), structured(task_of(problem)).pairs[name, name]
    assert norm <= bound < norm * (1 + 1e-3)


def test_other_modules_have_what_needs_no_rules():
    layer = nn.Linear(3, 2).double()
    report = hk.bounds(layer, torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    assert report.ratio("structured") == pytest.approx(1.0, rel=1e-8)
    assert any("a_priori" in note for note in report.notes)
    assert "a_priori" not in report.values["whole"]


def test_a_block_of_a_library_is_called_by_keywords():
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=7, **sizes)).eval()
    states = torch.randn(2, 5, 8)
    positions = model.model.rotary_emb(states, torch.arange(5)[None])
    call = {"hidden_states": states, "position_embeddings": positions}
    block, target = model.model.layers[1], torch.zeros(2, 5, 8)
    report = hk.bounds(block, call, target)
    H = hk.hessian(block.double(), {k: (v.double() if k == "hidden_states" else tuple(x.double() for x in v)) for k, v in call.items()},
                   target.double())  # fmt: skip
    assert report.values["whole"]["true"] == pytest.approx(float(torch.linalg.matrix_norm(H.matrix, 2)), rel=1e-6)
    assert not report.violated
    with pytest.raises(hk.InputError, match=r"inputs are torch.int64 \(2, 5\); .* pass a block, such as model.model.layers"):
        hk.bounds(model, torch.ones(2, 5).long(), torch.ones(2, 5).long(), loss="cross_entropy")


def test_an_attention_that_hardly_moves():
    # the logits' gap lets one softmax weight underflow, so that a factor of a product has derivatives of 1e-160
    problem = draw_problem(100038)
    own = structured(read_request(problem.module, problem.x[None], problem.target[None], loss=problem.loss).only())
    assert problem.hessian.spectral_norm() <= own.whole < 10 * problem.hessian.spectral_norm()
