"""Where the blocks of a model are, found by what flows between modules or named; and what a model does without one of them."""

from __future__ import annotations

import copy

import pytest
import torch
from depth_reference import language_model, tokens
from model_zoo import InDouble, generic
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.diagnostics.depth import depth_diagnostics
from hessiankit.support.errors import InputError

IDS, LABELS = tokens(3, 5), tokens(3, 5, seed=1)
LABELS[0, :3] = -100


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


def test_a_run_of_equal_modules_inside_a_sequential():
    model = nn.Sequential(nn.Linear(3, 4), Residual(), Residual(), nn.LayerNorm(4), nn.Linear(4, 2))
    assert names(model, torch.randn(2, 5, 3)) == ("1", "2")


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
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.ModuleList([Residual(), Residual()])
            self.right = nn.ModuleList([Residual(), Residual()])

        def forward(self, x: Tensor) -> Tensor:
            a, b = x, 2 * x
            for block in self.left:
                a = block(a)
            for block in self.right:
                b = block(b)
            return a + b

    x = torch.randn(2, 3, 4)
    with pytest.raises(InputError, match="two stacks of blocks, 'left' and 'right'"):
        names(Two(), x)
    assert names(Two(), x, blocks="right") == ("right.0", "right.1")


def test_blocks_that_return_tuples_and_named_states():
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Residual(extra=True), Residual(extra=True), Residual(extra=True)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x=x)[0]
            return x

    model = Keywords().double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
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
    gpt = hf.GPT2LMHeadModel(hf.GPT2Config(**special, n_positions=6, n_embd=4, n_layer=2, n_head=2))
    llama = hf.LlamaForCausalLM(
        hf.LlamaConfig(**special, hidden_size=8, intermediate_size=6, num_hidden_layers=3, num_attention_heads=2)
    )
    ids = tokens(2, 5, vocabulary=11)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    for model, prefix, second in ((gpt, "transformer.h", "ln_2"), (llama, "model.layers", "post_attention_layernorm")):
        wrapped = InDouble(generic(model))
        report = depth_diagnostics(wrapped, batch, what="all", exact_below=0, draws=2, products=3, curvature="autograd")
        seen = {}
        last = model.get_submodule(f"{prefix}.1.{second}")
        handle = last.register_forward_pre_hook(lambda module, args, seen=seen: seen.update(x=args[0]))
        assert report.blocks[1] == f"model.{prefix}.1"
        assert report.stream.tokens == 8
        with torch.no_grad():
            out = wrapped(**{k: v for k, v in batch.items() if k != "labels"}, output_hidden_states=True, use_cache=False)
        handle.remove()
        kept = mask.bool()
        for k in range(len(report.blocks)):  # their last hidden state is after the final norm
            expected = float(out.hidden_states[k][kept].var(-1, correction=0).mean())
            assert report.stream.variance[k] == pytest.approx(expected, rel=1e-10)
        middle = float(seen["x"][kept].var(-1, correction=0).mean())
        assert report.stream.middle_variance[1] == pytest.approx(middle, rel=1e-10)
        loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        assert report.drop.loss == pytest.approx(float(loss), rel=1e-10)
        assert report.jacobians.product_error < 1e-10


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
