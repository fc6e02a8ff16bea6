"""Jacobians, lambda_max and trace by layer against dense matrices of autograd; which modules are blocks; a model without one."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from curvature_reference import Formula, draw, gradient_twice
from depth_reference import dense_jacobian, gradient_of, language_model, stream_of, tokens
from model_zoo import InDouble, generic
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.support.errors import InputError, TraceError
from hessiankit.training.depth import depth_diagnostics
from hessiankit.training.depth.products import double_backward, trace_of

IDS, LABELS = tokens(2, 3), tokens(2, 3, seed=1)
LABELS[1, 2] = -100
SHARP = {"tol": 1e-11, "products": 600, "exact_below": 10_000}


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(IDS).flatten(0, 1), LABELS.flatten())


def dense_ggn(model: nn.Module, parameters: list[nn.Parameter]) -> torch.Tensor:
    """J^T L'' J with J one row of autograd a logit and L'' = diag p - p p^T in closed form."""
    kept = LABELS.flatten() != -100
    logits = model(IDS).flatten(0, 1)[kept]
    J = torch.stack([gradient_of(z, parameters) for z in logits.flatten()])
    p = logits.softmax(-1).detach()
    curved = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)) / len(p)
    return J.T @ curved @ J


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_against_dense_matrices(placement):
    model = language_model(2, placement, d_model=2, d_ff=3, n_heads=1)
    parameters = [list(block.parameters()) for block in model.blocks]
    dense = {"hessian": [gradient_twice(loss_of(model), own) for own in parameters]}
    dense["ggn"] = [dense_ggn(model, own) for own in parameters]
    for method in ("exact", "autograd"):
        report = depth_diagnostics(model, IDS, LABELS, what=("hessian", "ggn"), curvature=method, **SHARP)
        for what, matrices in dense.items():
            found = getattr(report, what)
            assert (found.method, found.draws) == (method, None)
            for k, matrix in enumerate(matrices):
                assert found.sizes[k] == len(matrix)
                top = float(torch.linalg.eigvalsh(matrix)[-1])
                assert found.top[k].value == pytest.approx(top, rel=1e-10)
                assert found.top[k].converged
                assert abs(found.top[k].value - top) <= found.top[k].residual + 1e-13
                assert abs(found.trace[k].value - float(matrix.trace())) <= 1e-10 * float(matrix.abs().max())
                assert found.trace[k].standard_error == 0


def test_probes_of_the_trace_have_the_errors_that_they_say():
    """Normalised errors of 300 estimates of a matrix's trace: mean about 0, spread about 1 (Student with 15 degrees: 1.07)."""
    A = torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = A + A.T
    found = [trace_of(A.matmul, A[0], 16, seed) for seed in range(300)]
    e = torch.tensor([(one.value - float(A.trace())) / one.standard_error for one in found])
    assert abs(float(e.mean())) < 0.25
    assert 0.9 < float(e.std()) < 1.3


def test_auto_takes_the_closed_forms_for_small_models_and_says_so(monkeypatch):
    model = language_model(1)
    report = depth_diagnostics(model, IDS, LABELS, what="ggn", products=2)
    assert report.ggn.method == "exact"
    assert "closed forms, exact traces" in str(report)
    monkeypatch.setattr("hessiankit.training.depth.curvature.SMALL", 10)
    report = depth_diagnostics(model, IDS, LABELS, what="ggn", products=2, exact_below=0)
    assert report.ggn.method == "autograd"
    assert "8 random probes" in str(report)


def test_auto_falls_back_where_a_model_cannot_be_traced(monkeypatch):
    def refuse(*args, **kwargs):
        raise TraceError("trace: the forward of Model branches on a value")

    monkeypatch.setattr("hessiankit.training.depth.curvature.hessian_operator", refuse)
    report = depth_diagnostics(language_model(1), IDS, LABELS, what="ggn", products=2)
    assert report.ggn.method == "autograd"
    assert "branches on a value" in report.ggn.reason
    assert "branches on a value" in str(report)
    with pytest.raises(TraceError, match="branches on a value"):
        depth_diagnostics(language_model(1), IDS, LABELS, what="ggn", curvature="exact", products=2)


def test_shared_blocks_are_each_given_the_shared_parameters():
    block = hk.TransformerBlock(4, 5, placement="pre").double()
    twin = hk.TransformerBlock(4, 5, placement="pre").double()
    twin.attention.W_Q = block.attention.W_Q
    model = nn.Sequential(block, twin)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    report = depth_diagnostics(model, x, tokens(2, 3, vocabulary=4), what=("gradient", "hessian"), products=2)
    assert report.hessian.sizes[0] == report.hessian.sizes[1]
    assert min(report.gradient) > 0


TO_ROUNDING = {"what": "jacobian", "tol": 1e-11, "products": 400}


@pytest.mark.parametrize("placement", ["pre", "post", "lns", "hybridnorm"])
def test_norms_against_dense_jacobians(placement):
    model = language_model(3, placement)
    found = depth_diagnostics(model, IDS, **TO_ROUNDING).jacobians
    xs = stream_of(model, IDS)
    dense = [dense_jacobian(block, x) for block, x in zip(model.blocks, xs, strict=False)]
    n = len(dense[0])
    assert (found.size, found.draws) == (n, None)
    for k, J in enumerate(dense):
        A = J - torch.eye(n, dtype=torch.float64)
        assert found.spectral[k].value == pytest.approx(float(torch.linalg.matrix_norm(A, 2)), rel=1e-10)
        assert found.spectral[k].relative < 1e-10
        assert found.spectral[k].converged
        assert found.rms[k].value == pytest.approx(float(A.norm()) / math.sqrt(n), rel=1e-12)
    whole = dense[2] @ dense[1] @ dense[0]
    assert found.whole_spectral.value == pytest.approx(float(torch.linalg.matrix_norm(whole, 2)), rel=1e-10)
    assert found.gain.value == pytest.approx(float(whole.norm()) / math.sqrt(n), rel=1e-10)
    assert found.product_error < 1e-12


def test_the_product_check_sees_a_path_around_the_blocks():
    """A model that gives x_1 to its last block a second time: the product of the blocks is not the whole."""

    def linear(m, x: Tensor, kept: list[Tensor]) -> Tensor:
        y = x @ m.W + 0.5 * sum(kept, start=torch.zeros_like(x))
        kept.append(x)
        return y

    def forward(m, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in m.blocks:
            x = block(x, kept)
        return x

    side = Formula(forward, blocks=nn.ModuleList(Formula(linear, W=(3, 3)) for _ in range(2)))
    assert depth_diagnostics(side, draw(1, 2, 3), what="jacobian").jacobians.product_error > 1e-2


def test_branches_of_zeros_have_norm_zero_without_error():
    model = language_model(2, "pre")
    with torch.no_grad():
        for block in model.blocks:
            for p in (block.attention.W_V, block.feedforward.W_2):
                p.zero_()
    found = depth_diagnostics(model, IDS, what="jacobian").jacobians
    assert [(one.value, one.residual, one.relative) for one in found.spectral] == [(0.0, 0.0, 0.0)] * 2
    assert found.whole_spectral.value == pytest.approx(1.0, rel=1e-12)


def test_a_loose_tolerance_gives_a_lower_bound_and_says_so():
    model = language_model(2, seed=1)
    exact = depth_diagnostics(model, IDS, **TO_ROUNDING).jacobians
    report = depth_diagnostics(model, IDS, what="jacobian", products=2)
    for loose, sharp in zip(report.jacobians.spectral, exact.spectral, strict=True):
        assert loose.value < sharp.value
        assert not loose.converged
        assert loose.residual > 1e-3
    assert "ran out of products" in str(report)


def test_probes_agree_with_the_exact_norms_within_their_standard_errors():
    model = language_model(3, d_model=2, d_ff=3, n_heads=1)
    exact = depth_diagnostics(model, IDS, what="jacobian", products=2).jacobians
    found = depth_diagnostics(model, IDS, what="jacobian", products=2, exact_below=0, draws=32).jacobians
    assert found.draws == 32
    for a, b in zip((*found.rms, found.gain), (*exact.rms, exact.gain), strict=True):
        assert 0 < abs(a.value - b.value) < 3.5 * a.standard_error < b.value


class Residual(nn.Module):
    """x + f(x), f a list of its own that keeps the shape."""

    def __init__(self, d: int = 4, extra: bool = False) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d))
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, str]:
        y = x + self.f(x)
        return (y, "something else") if self.extra else y


def names(model: nn.Module, data: Tensor, **options: object) -> tuple[str, ...]:
    return depth_diagnostics(model, data, what="variance", **options).blocks


def test_our_models():
    assert names(language_model(), IDS) == ("blocks.0", "blocks.1", "blocks.2")
    images = hk.VisionTransformer(4, 3, 2, d_model=4, d_ff=6, n_blocks=2)
    assert names(images, torch.randn(2, 3, 4)) == ("blocks.0", "blocks.1")
    one = hk.VisionTransformer(4, 3, 2, d_model=4, d_ff=6)
    report = depth_diagnostics(one, torch.randn(2, 3, 4), what="variance")
    assert report.blocks == ("blocks.0",)
    assert len(report.stream.variance) == 2


def test_named_blocks():
    model = nn.Sequential(nn.Linear(3, 4), Residual(), Residual(), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(2, 5, 3)
    assert names(model, x, blocks=["1", model[2], "3"]) == ("1", "2", "3")
    with pytest.raises(InputError, match="maps shape"):
        names(model, x, blocks=["0", "2"])
    with pytest.raises(InputError, match="'3' does not take the output of '1'"):
        names(model, x, blocks=["1", "3"])
    with pytest.raises(InputError, match="no module 'one'"):
        names(model, x, blocks=["one"])
    with pytest.raises(InputError, match="no module of the model"):
        names(model, x, blocks=[Residual()])
    with pytest.raises(InputError, match="is empty"):
        names(model, x, blocks=[])
    with pytest.raises(InputError, match="no ModuleList or Sequential of the model"):
        names(model, x, blocks="1")


def test_two_stacks_beside_each_other_have_to_be_named():
    def forward(m, x: Tensor) -> Tensor:
        return m.left[1](m.left[0](x)) + m.right[1](m.right[0](2 * x))

    left, right = (nn.ModuleList([Residual(), Residual()]) for _ in range(2))
    model, x = Formula(forward, left=left, right=right), draw(2, 3, 4)
    with pytest.raises(InputError, match="two stacks of blocks, 'left' and 'right'"):
        names(model, x)
    assert names(model, x, blocks="right") == ("right.0", "right.1")


def test_blocks_that_return_tuples_and_named_states():
    def forward(m, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x=x)[0]
        return x

    model, x = Formula(forward, layers=nn.ModuleList(Residual(extra=True) for _ in range(3))), draw(2, 3, 4)
    labels = tokens(2, 3, vocabulary=4)
    report = depth_diagnostics(model, x, labels, what="all", exact_below=0, draws=4)
    assert len(report.blocks) == 3
    with torch.no_grad():
        without = model.layers[2](x=model.layers[0](x=x)[0])[0]
        change = nn.functional.cross_entropy(without.flatten(0, 1), labels.flatten()) - report.drop.loss
    assert report.drop.loss_change[1] == pytest.approx(float(change), abs=1e-12)


def test_torch_layers_off_their_fused_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    report = depth_diagnostics(model, torch.randn(2, 5, 8), what=("variance", "jacobian"), draws=2)
    assert report.blocks == ("layers.0", "layers.1", "layers.2")
    assert report.stream.middle_variance is not None


def test_hugging_face_decoders():
    hf = pytest.importorskip("transformers")
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "vocab_size": 11}
    model = generic(hf.GPT2LMHeadModel(hf.GPT2Config(**special, n_positions=6, n_embd=4, n_layer=2, n_head=2)))
    wrapped, ids, seen = InDouble(model), tokens(2, 5, vocabulary=11), []
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    report = depth_diagnostics(wrapped, batch, what="all", exact_below=0, draws=2, products=3, curvature="autograd")
    assert report.blocks == ("model.transformer.h.0", "model.transformer.h.1")
    model.transformer.h[1].ln_2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        out = wrapped(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    kept = mask.bool()
    for k in range(2):  # their last hidden state is after the final norm
        expected = float(out.hidden_states[k][kept].var(-1, correction=0).mean())
        assert report.stream.variance[k] == pytest.approx(expected, rel=1e-10)
    middle = float(seen[-1][kept].var(-1, correction=0).mean())
    assert report.stream.middle_variance[1] == pytest.approx(middle, rel=1e-10)
    loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert report.drop.loss == pytest.approx(float(loss), rel=1e-10)
    assert report.jacobians.product_error < 1e-10


NORM_PLACES = {"Llama": True, "Qwen3": True, "Cohere": True, "Gemma2": False, "Olmo2": False}
"""Sandwich norms (Gemma 2) and norms behind the sub-layers (OLMo 2) are no pre-norm; norms of queries and keys (Qwen 3) do not
count, and the two sub-layers of Cohere's block share a norm."""


@pytest.mark.parametrize("name", NORM_PLACES)
def test_pre_norm_is_recognised_by_what_norms_take(name):
    hf = pytest.importorskip("transformers")
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "max_position_embeddings": 16}
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**special, **heads, **sizes))
    report = depth_diagnostics(model, {"input_ids": tokens(2, 5, vocabulary=11)}, what="variance")
    assert ("pre-norm" in report.laws.theory) is NORM_PLACES[name]


def test_a_metric_of_ones_own_is_taken_with_each_block_removed():
    model = language_model(3, "pre")

    def metric(model: nn.Module) -> float:
        return score(model)[0] ** 2

    report = depth_diagnostics(model, IDS, LABELS, what="drop", drop_metric=metric)
    assert report.drop.metric == pytest.approx(metric(model), rel=1e-12)
    expected = [metric(without(model, k)) - metric(model) for k in range(3)]
    assert report.drop.metric_change == pytest.approx(expected, rel=1e-9)
    assert "dmetric" in str(report)
    with pytest.raises(hk.InputError, match=r"drop_metric returned 'good'; expected a finite number"):
        depth_diagnostics(model, IDS, LABELS, what="drop", drop_metric=lambda model: "good")


def score(model: nn.Module) -> tuple[float, float]:
    with torch.no_grad():
        logits = model(IDS)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    return float(loss), float((logits.argmax(-1) == LABELS)[LABELS != -100].double().mean())


def without(model: hk.Transformer, k: int) -> hk.Transformer:
    cut = copy.deepcopy(model)
    del cut.blocks[k]
    return cut


@pytest.mark.parametrize("placement", ["pre", "post", "lns", "hybridnorm*", "deepnorm"])
def test_drop_equals_that_of_the_shorter_model(placement):
    model = language_model(3, placement)
    found = depth_diagnostics(model, IDS, LABELS, what="drop").drop
    loss, accuracy = score(model)
    assert (found.loss, found.accuracy) == (pytest.approx(loss, rel=1e-13), pytest.approx(accuracy, rel=1e-13))
    for k in range(3):
        less, right = score(without(model, k))
        assert found.loss_change[k] == pytest.approx(less - loss, abs=1e-13)
        assert found.accuracy_change[k] == pytest.approx(right - accuracy, abs=1e-13)
    assert max(map(abs, found.loss_change)) > 1e-3


@pytest.mark.parametrize("named", [False, True], ids=["looked up", "imported by name"])
def test_attention_has_a_second_derivative_however_a_model_finds_it(named):
    imported = torch.nn.functional.scaled_dot_product_attention
    x = torch.randn(1, 600, 4, requires_grad=True)
    with double_backward():
        attend = imported if named else torch.nn.functional.scaled_dot_product_attention
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            (slope,) = torch.autograd.grad(attend(x, x, x).pow(3).sum(), x, create_graph=True)
    (product,) = torch.autograd.grad(slope.sum(), x)
    assert product.isfinite().all()
    assert named or max(kept) < 600 * 600, "tokens times tokens were kept"
