"""The depth report: what it measures of the residual stream, prints and refuses, and that the model is left as it was."""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from depth_reference import assert_same_state, gradient_of, language_model, state_of, stream_of, tokens
from torch import nn

from hessiankit.blocks import PLACEMENTS, Placement
from hessiankit.blocks.placements import steps
from hessiankit.support.errors import InputError, OutOfMemoryError
from hessiankit.training.depth import QUANTITIES, angular_distance, depth_diagnostics, growth_laws

IDS, LABELS = tokens(2, 4), tokens(2, 4, seed=1)


def test_micro_batches_give_the_same_numbers():
    model = language_model(1, d_model=2, d_ff=2, n_heads=1)
    labels = LABELS.clone()
    labels[0, 1:] = -100  # the two micro-batches weigh 1 to 4
    options = {"what": "all", "curvature": "autograd", "products": 2, "exact_below": 1000}
    whole = depth_diagnostics(model, IDS, labels, **options)
    parts = depth_diagnostics(model, [(IDS[:1], labels[:1]), (IDS[1:], labels[1:])], **options)
    cut = depth_diagnostics(model, IDS, labels, **options, micro_batch=1)
    assert set(whole.memory) == set(QUANTITIES)
    expected = json.loads(json.dumps(whole.to_dict()))
    for other in (parts.to_dict(), cut.to_dict()):
        for section, name, tolerance in (
            ("stream", "variance", 1e-10), ("stream", "second_moment", 1e-10), ("angles", "all", 1e-10), ("angles", "last", 1e-10),
            ("drop", "loss_change", 1e-10), ("drop", "accuracy_change", 1e-10), ("gradient", None, 1e-6),
            ("jacobians", "rms", 1e-10), ("hessian", "trace", 1e-10), ("ggn", "trace", 1e-10),
        ):  # fmt: skip
            a, b = (numbers(record[section][name] if name else record[section]) for record in (expected, other))
            assert (a - b).abs().max() <= tolerance * a.abs().max(), (section, name)


def numbers(found):
    return torch.tensor([x["value"] if isinstance(x, dict) else x for x in found], dtype=torch.float64)


@pytest.mark.parametrize(
    ("at", "stop"),
    [
        ("variance", ZeroDivisionError),
        ("drop", KeyboardInterrupt),
        ("jacobian", KeyboardInterrupt),
        ("hessian", ZeroDivisionError),
    ],
)
def test_the_model_is_left_as_it_was_after_an_interrupt(stop, at):
    model = language_model(2, "lns", d_model=2, d_ff=2, n_heads=1).train()
    model.blocks[0].norm_1.weight.requires_grad_(False)
    model.embedding.W_E.grad = torch.ones_like(model.embedding.W_E)
    before = state_of(model)

    def interrupt(what: str, done: int, total: int) -> None:
        assert "MiB" in what
        if what.startswith(at) and done == total - 1:
            raise stop

    with pytest.raises(stop):
        depth_diagnostics(model, IDS, LABELS, what="all", progress=interrupt, curvature="autograd", products=2)
    assert_same_state(before, model)


def test_padding_does_not_count():
    model = language_model(placement="pre", seed=3)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[1, 2:] = True
    inputs = {"inputs": IDS, "key_padding_mask": padding}
    report = depth_diagnostics(model, inputs, what=("variance", "angles"))
    assert report.stream.tokens == 6
    alone = [depth_diagnostics(model, ids, what=("variance", "angles")) for ids in (IDS[:1], IDS[1:, :2])]
    mean = sum(n * torch.tensor(r.stream.variance) for n, r in zip((4, 2), alone, strict=True)) / 6
    assert (torch.tensor(report.stream.variance) - mean).abs().max() < 1e-6 * mean.max()
    ends = depth_diagnostics(model, inputs, what="variance", tokens="last")
    assert ends.stream.tokens == 2
    assert ends.stream.variance != report.stream.variance
    assert ends.angles is ends.drop is ends.gradient is ends.jacobians is ends.hessian is None
    last = (alone[0].angles.last + alone[1].angles.last) / 2
    assert (report.angles.last - last).abs().max() < 1e-12


def test_squared_error():
    target = torch.randn(2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = language_model()
    report = depth_diagnostics(model, IDS, target, loss="mse", what=("drop", "gradient", "hessian"))
    with torch.no_grad():
        expected = float((model(IDS) - target).square().mean())
    assert report.drop.loss == pytest.approx(expected, rel=1e-12)
    assert report.drop.accuracy is report.drop.accuracy_change is None
    assert "dacc" not in str(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"what": "variances"}, "did you mean 'variance'"),
        ({"what": ()}, "asks for nothing"),
        ({"tokens": "first"}, "tokens='first'"),
        ({"loss": "hinge"}, "loss='hinge'"),
        ({"draws": 0}, "draws=0"),
        ({"tol": 0.0}, "tol=0.0"),
        ({"what": "hessian", "curvature": "dense"}, "curvature='dense'"),
        ({"target": None}, "target is missing"),
        ({"target": LABELS[:, :2]}, "target has shape"),
        ({"target": torch.full((2, 4), -100)}, "every label is -100"),
    ],
)
def test_errors(options, words):
    with pytest.raises(InputError, match=words):
        depth_diagnostics(language_model(), IDS, **{"target": LABELS, **options})


def test_a_state_that_is_not_finite_is_named():
    model = language_model()
    model.blocks[1].feedforward.W_1.data[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"the output of block 'blocks\.1' is NaN"):
        depth_diagnostics(model, IDS, LABELS)


def test_memory_is_refused_before_the_work(monkeypatch):
    monkeypatch.setattr("hessiankit.support.memory.available_memory", lambda device: 10_000)
    with pytest.raises(OutOfMemoryError, match="micro_batch="):
        depth_diagnostics(language_model(), IDS, LABELS, what="jacobian")


def test_memory_is_that_of_what_autograd_keeps():
    """Against the storages of a graph that is alive; a model that is frozen needs as much."""
    model = language_model()
    kept = {}
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(id(x), x), lambda x: x):
        out = model(IDS)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept.values()}
    graph = sum(size for at, size in storages.items() if at not in known)
    weights = sum(p.numel() * 8 for block in model.blocks for p in block.parameters())
    expected = graph + 3 * out.numel() * 8 + 2 * weights
    found = depth_diagnostics(model, IDS, LABELS, what="gradient").memory["gradient"]
    assert expected / 1.3 < found < 1.3 * expected  # the two graphs differ by the attention that was chosen
    assert depth_diagnostics(model.requires_grad_(False), IDS, LABELS, what="gradient").memory["gradient"] == found


@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_norms(frozen):
    """Of a frozen model too."""
    model = language_model().requires_grad_(not frozen)
    report = depth_diagnostics(model, IDS, LABELS, what="gradient")
    assert all(p.requires_grad is not frozen for p in model.parameters())
    loss = nn.functional.cross_entropy(model.requires_grad_(True)(IDS).flatten(0, 1), LABELS.flatten())
    for block, found in zip(model.blocks, report.gradient, strict=True):
        assert found == pytest.approx(float(gradient_of(loss, list(block.parameters())).norm()), rel=1e-12)


def test_the_page():
    """docs/depth.md runs, and prints what it says: headings exactly, numbers but for rounding and times."""
    text = (Path(__file__).parents[2] / "docs" / "depth.md").read_text(encoding="utf-8")
    code, printed, another = re.findall(r"```(?:python)?\n(.*?)\n```", text, re.DOTALL)
    names: dict[str, object] = {}
    with redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    found, expected = (_words(page) for page in (out.getvalue(), printed))
    assert len(found) == len(expected) > 100
    for a, b in zip(found, expected, strict=True):
        assert a == b if isinstance(a, str) else a == pytest.approx(b, rel=2e-3, abs=2e-4)
    pytest.importorskip("transformers")
    exec(another, names)
    assert len(names["scaled"].stream.variance) == 5


def _words(text: str) -> list[str | float]:
    """Words and numbers, without the time taken and what is only rounding (1.2e-16)."""
    text = re.sub(r"[\d.]+ s\n|[\d.]+e-\d+", "", text)
    return [float(word) if re.fullmatch(r"[+-]?[\d.]*\d", word) else word for word in re.findall(r"[^\s,()]+", text)]


def test_stream_statistics():
    model = language_model()
    report = depth_diagnostics(model, IDS, what="variance")
    xs = [x.numpy().reshape(-1, 4) for x in stream_of(model, IDS)]
    found = report.stream
    assert np.allclose(found.variance, [x.var(axis=1).mean() for x in xs], rtol=1e-12)
    assert np.allclose(found.second_moment, [(x**2).mean() for x in xs], rtol=1e-12)
    for k, (x, y) in enumerate(pairwise(xs)):
        f = y - x
        sizes = np.sqrt((f**2).sum(1)), np.sqrt((x**2).sum(1))
        assert found.rho["block"][k] == pytest.approx(((x * f).sum(1) / sizes[0] / sizes[1]).mean(), rel=1e-12)
        assert found.update_ratio["block"][k] == pytest.approx((sizes[0] / sizes[1]).mean(), rel=1e-12)


def post_in_halves(b, X):
    """A placement of one's own: Y is a norm's output, and the network's norm is given something else."""
    Y = b.norm_1(X + 0.5 * b.attention(X))
    return b.norm_2(Y + 0.5 * b.feedforward(Y))


def test_the_stream_between_the_sub_layers_of_every_placement(monkeypatch):
    """x' is what the block's own equation calls Y: the network's branch starts from it."""
    monkeypatch.setitem(PLACEMENTS, "post-in-halves", Placement("post-in-halves", post_in_halves, "halves", "a test"))
    for name in PLACEMENTS:
        model = language_model(2, name, d_model=4)
        found = depth_diagnostics(model, IDS, what="variance").stream
        assert found.middle_variance is not None, name
        x = model.embedding(IDS).detach()
        if model.embedding_norm is not None:
            x = model.embedding_norm(x).detach()
        for k, block in enumerate(model.blocks):
            with torch.no_grad():
                values = dict(steps(block.own_placement.equation, block, x))
            Y, y = values["Y"], values[""]
            assert found.middle_variance[k] == pytest.approx(float(Y.var(-1, correction=0).mean()), rel=1e-10), name
            for kind, a, b in (("attention", x, Y), ("feedforward", Y, y)):
                cosine = torch.cosine_similarity(a, b - a, dim=-1, eps=0)
                ratio = (b - a).norm(dim=-1) / a.norm(dim=-1)
                assert found.rho[kind][k] == pytest.approx(float(cosine.mean()), rel=1e-9), name
                assert found.update_ratio[kind][k] == pytest.approx(float(ratio.mean()), rel=1e-9), name
            x = y


def test_a_branch_of_zeros_has_no_direction():
    model = language_model(2)
    for p in (model.blocks[0].attention.W_O, model.blocks[0].feedforward.W_2):
        p.data.zero_()
    found = depth_diagnostics(model, IDS, what="variance").stream
    assert found.rho["block"][0] == found.update_ratio["block"][0] == 0.0


def test_angles():
    model = language_model()
    found = depth_diagnostics(model, IDS, what="angles").angles
    xs = stream_of(model, IDS)
    for i in range(4):
        for j in range(4):
            cos = torch.nn.functional.cosine_similarity(xs[i], xs[j], dim=-1, eps=0).clamp(-1, 1)
            d = cos.arccos() / math.pi
            assert float(found.all[i, j]) == pytest.approx(float(d.mean()), abs=3e-8 if i == j else 1e-12)
            assert float(found.last[i, j]) == pytest.approx(float(d[:, -1].mean()), abs=3e-8 if i == j else 1e-12)
    assert found.all.dtype == torch.float64
    assert torch.equal(found.all.diagonal(), torch.zeros(4, dtype=torch.float64))
    assert torch.equal(found.all, found.all.T)
    small = torch.tensor([[1.0, 0.0], [1.0, 1e-9]], dtype=torch.float64)
    assert float(angular_distance(*small)) == pytest.approx(1e-9 / math.pi, rel=1e-12)  # arccos of the cosine is 0


def test_the_triangle_of_angles():
    found = depth_diagnostics(language_model(5), IDS, what="angles").angles
    for raw, square in ((found.by_distance(), found.all), (found.by_distance("last"), found.last)):
        assert raw.shape == (5, 5)
        for n in range(1, 6):
            for k in range(1, 6):
                assert (
                    float(raw[n - 1, k - 1]) == float(square[k - 1, k + n - 1]) if k + n <= 6 else math.isnan(raw[n - 1, k - 1])
                )


LAYERS = np.arange(1, 13, dtype=float)


@pytest.mark.parametrize(
    ("name", "values", "a", "b"),
    [
        ("linear", 0.3 + 2 * LAYERS, 0.3, 2.0),
        ("quadratic", 5 - 0.25 * LAYERS**2, 5.0, -0.25),
        ("logarithmic", 1 + 3 * np.log(LAYERS), 1.0, 3.0),
        ("exponential", 0.5 * np.exp(0.4 * LAYERS), 0.5, 0.4),
        ("exponential", 7 * np.exp(-1.5 * LAYERS), 7.0, -1.5),
        ("exponential", 1e-30 * np.exp(3.7 * LAYERS), 1e-30, 3.7),
    ],
)
def test_each_law_is_found_in_its_own_values(name, values, a, b):
    found = growth_laws(values)
    assert found.best == name
    law = found.laws[name]
    assert law.r_squared == pytest.approx(1.0, abs=1e-9)
    assert (law.a, law.b) == (pytest.approx(a, rel=1e-4), pytest.approx(b, rel=1e-5))
    assert all(other.r_squared < 0.99 for other in found.laws.values() if other.name != name)


def test_a_variance_that_does_not_change_has_no_law():
    assert growth_laws(1 + 3 * (LAYERS - 1) ** 2).exponent == pytest.approx(2)
    assert math.isnan(growth_laws([2.0, 1.0, 3.0]).exponent)
    found = growth_laws([1.0, 1.0 + 1e-9, 1.0])
    assert found.best == "constant"
    assert math.isnan(found.laws["linear"].r_squared)
    assert "constant" in str(found)
    assert growth_laws([1.0, 1.00001, 1.00002]).best == "linear"  # small, but no rounding


@pytest.mark.parametrize(("placement", "words"), [("pre", "const * L^2"), ("lns", "log L"), ("post", "no law")])
def test_theory_follows_the_placement(placement, words):
    report = depth_diagnostics(language_model(2, placement), IDS, what="variance")
    assert words in str(report)


def library_models():
    """Decoders and encoders of two blocks: where the residual sum is formed, and whether they are pre-norm."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    bloom = {"vocab_size": 20, "hidden_size": 8, "n_layer": 2, "n_head": 2}
    t5 = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    opt = {**sizes, "ffn_dim": 12, "word_embed_proj_dim": 8, "max_position_embeddings": 16}
    return {
        "block": (transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), True),
        "sub-layer": (transformers.T5EncoderModel(transformers.T5Config(**t5)), True),
        "attention": (transformers.BloomForCausalLM(transformers.BloomConfig(**bloom)), True),
        "another shape": (transformers.OPTForCausalLM(transformers.OPTConfig(**opt)), True),
        "behind a norm": (
            transformers.BloomForCausalLM(transformers.BloomConfig(**bloom, apply_residual_connection_post_layernorm=True)),
            False,
        ),
        "before a norm": (transformers.BertForMaskedLM(transformers.BertConfig(**sizes)), False),
    }


NORM_BEHIND_THE_SUM = {  # in a block of each kind
    "block": "post_attention_layernorm",
    "sub-layer": "layer.1.layer_norm",
    "attention": "post_attention_layernorm",
    "another shape": "final_layer_norm",
}


@pytest.mark.parametrize("where", ["block", "sub-layer", "attention", "another shape", "behind a norm", "before a norm"])
def test_the_residual_sum_is_found_wherever_a_library_forms_it(where):
    model, is_pre_norm = library_models()[where]
    model = model.double().eval()
    report = depth_diagnostics(model, IDS, what="variance", loss="cross_entropy")
    assert ("no law" in str(report)) is not is_pre_norm
    if not is_pre_norm:
        assert report.stream.middle_variance is None
        return
    taken = []
    for name in report.blocks:
        norm = model.get_submodule(f"{name}.{NORM_BEHIND_THE_SUM[where]}")
        norm.register_forward_pre_hook(lambda _, args: taken.append(float(args[0].var(-1, correction=0).mean())))
    with torch.no_grad():
        model(IDS)
    assert report.stream.middle_variance == pytest.approx(taken, rel=1e-12)


def test_a_model_without_logits_has_a_stream_and_jacobians():
    """A loss alone needs them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.BertConfig(vocab_size=20, **sizes, attn_implementation="eager")
    model = transformers.BertModel(config).double().eval()  # returns hidden states, and those of a pooler

    class FirstOutput(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids).last_hidden_state

    report, bare = (depth_diagnostics(m, IDS, what=("variance", "angles", "jacobian")) for m in (FirstOutput(), model))
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True).hidden_states
    assert bare.stream.variance == pytest.approx([float(x.var(-1, correction=0).mean()) for x in states], rel=1e-12)
    assert [one.value for one in bare.jacobians.spectral] == [one.value for one in report.jacobians.spectral]
    with pytest.raises(InputError, match="expected a tensor of logits"):
        depth_diagnostics(model, IDS, LABELS, what="gradient")
