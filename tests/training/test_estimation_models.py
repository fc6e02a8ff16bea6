"""What the measurement does to a model: nothing; what it says of models that it cannot measure; models of Hugging Face."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from sharpness_cases import expected_squares, plain_parts, tiny, tokens
from torch import nn

from hessiankit import Monitor
from hessiankit.blocks import Transformer
from hessiankit.support import memory
from hessiankit.support.errors import InputError, OutOfMemoryError
from hessiankit.training.partition import Part, model_parts
from hessiankit.training.sharpness import replicates, sharpness

X, Y = tokens(4, 3), tokens(4, 3, seed=2)


class Faulty(nn.Module):
    """A model with something wrong in forward."""

    def __init__(self, fault):
        super().__init__()
        self.model, self.fault, self.calls = tiny(), fault, 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        logits = self.model(x)
        if self.fault == "random":
            return nn.functional.dropout(logits, 0.5, training=True)
        if self.fault == "buffer":
            self.seen += 1
        if self.fault == "detached":
            return logits.detach()
        if self.fault == "nan":
            return logits.masked_fill(x.unsqueeze(-1) == 0, float("nan"))
        if self.fault == "interrupt" and self.calls > 2:
            raise KeyboardInterrupt
        if self.fault == "rounding" and not torch.is_grad_enabled():  # another kernel
            return logits * (1 + 1e-15)
        if self.fault == "gradient":
            return logits + (0 * self.model.blocks[0].attention.W_Q.sum()).sqrt()
        return logits


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("random", "two calls of the model in evaluation mode on the same inputs give different outputs"),
        ("buffer", "a call of the model in evaluation mode changes its buffer 'seen'"),
        ("detached", "the model's output does not depend on its parameters"),
        ("nan", "the model's output is NaN or infinite, first at"),
        ("gradient", "the gradient of 'model.blocks.0.attention.W_Q' is NaN or infinite, though the output is finite"),
    ],
)
def test_faults(fault, message):
    model = Faulty(fault)
    model.train()
    with pytest.raises(InputError, match=message):
        sharpness(model, X, Y, parts=plain_parts(model))
    assert all(module.training for module in model.modules())
    assert float(model.seen) == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fault", [None, "interrupt", "rounding"])
def test_modes_and_gradients_are_left_alone(fault):
    """Also after Ctrl-C, and under no_grad, with kernels that round apart without autograd."""
    model = nn.Sequential(Faulty(fault), nn.Dropout(0.5)).train()
    model[0].model.blocks[0].eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    values, modes = [p.detach().clone() for p in model.parameters()], [module.training for module in model.modules()]
    with torch.no_grad(), pytest.raises(KeyboardInterrupt) if fault == "interrupt" else nullcontext():
        assert sharpness(model, X, Y, parts=plain_parts(model), micro_batch=2, draws=3).types["FFN"].value > 0
    assert [module.training for module in model.modules()] == modes
    assert all(bool((p.grad == 3).all()) for p in model.parameters())
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_frozen_parameters_are_left_out_and_named():
    model = tiny()
    whole = sharpness(model, X, Y)
    for name, p in model.named_parameters():
        p.requires_grad_("embedding" not in name)
    report = sharpness(model, X, Y)
    assert report.frozen == ("embedding.W_E", "embedding.P")
    assert "left out, frozen: embedding.W_E, embedding.P" in report.table()
    assert set(whole.types) - set(report.types) == {"Emb"}
    for kind in report.types:
        assert report.types[kind] == whole.types[kind]
    assert sharpness(model, X, Y, exact=True).frozen == report.frozen
    model.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter requires a gradient"):
        sharpness(model, X, Y)


def test_parameters_without_effect_are_zeros_and_named():
    model = nn.ModuleDict({"used": tiny(), "idle": nn.Linear(2, 2, bias=False).double()})
    model.forward = lambda x: model["used"](x)
    parts = [replace(part, type="Other" if part.parameter == "idle.weight" else "FFN") for part in plain_parts(model)]
    report = sharpness(model, X, Y, parts=parts, histograms=True)
    assert report.unused == ("idle.weight",)
    assert (report.types["Other"].value, report.histograms["Other"].zeros) == (0.0, 4)
    assert "no output depends on: idle.weight" in report.table()


def test_slices_of_a_fused_parameter_are_told_apart():
    model, parts = tiny(), model_parts(tiny())
    name = "blocks.0.feedforward.W_1"
    p = dict(model.named_parameters())[name]
    halves = [
        Part(name, kind, "", 0, "", p.numel() * n // 5, 1, ((a, b),)) for kind, a, b, n in (("QK", 0, 2, 2), ("VO", 2, 5, 3))
    ]
    found = replicates(model, X, Y, parts=[*halves, Part(name, "FFN", "", 0, "", p.numel())][:2], draws=3)
    whole = replicates(model, X, Y, parts=[part for part in parts if part.parameter == name], draws=3)
    torch.testing.assert_close(found.values.sum(2), whole.values[..., 0], rtol=1e-12, atol=0)
    assert float((found.values[..., 0] - found.values[..., 1]).abs().min()) > 0


def test_a_part_given_twice_or_of_another_model():
    parts = model_parts(tiny())
    with pytest.raises(InputError, match=r"the part 'embedding\.W_E' is given twice; pass each once"):
        sharpness(tiny(), X, Y, parts=[*parts, parts[0]])
    with pytest.raises(InputError, match=r"the model has no parameter 'blocks\.1\."):
        sharpness(tiny(), X, Y, parts=model_parts(tiny(layers=2)))


def test_tied_embedding_is_one_parameter_with_both_gradients():
    model = tiny(vocab=5)
    x = tokens(2, 3, vocab=2)
    report = sharpness(model, x, x, exact=True)
    wanted = expected_squares(model, x, torch.ones_like(x, dtype=torch.bool), model_parts(model))
    assert report.types["Emb"].value * report.types["Emb"].entries == pytest.approx(float(wanted[0] + wanted[1]), rel=1e-10)
    seen, positions = 2 * 4, 3 * 4  # rows 0 and 1, positions 0 to 2
    assert report.seen_rows.entries == seen + positions
    assert (
        report.seen_rows.value < report.types["Emb"].value * report.types["Emb"].entries / report.seen_rows.entries
    )  # head part


def test_seen_rows_of_an_untied_embedding_hold_all_of_it():
    model = tiny(vocab=7, tied=False)
    x, y = tokens(3, 3, vocab=3), tokens(3, 3, vocab=7)
    for exact in (True, False):
        report = sharpness(model, x, y, micro_batch=1, histograms=True, exact=exact)
        emb = report.types["Emb"]
        assert report.seen_rows.entries == 3 * 4 + 3 * 4
        assert report.seen_rows.value * report.seen_rows.entries == pytest.approx(emb.value * emb.entries, rel=1e-9)
        assert report.histograms["Emb"].zeros == 4 * 4 + 4  # four tokens and one position that do not occur


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_narrow_models(dtype, tolerance):
    """The labels are those of the model's own logits, so a few may differ; here none does in float32."""
    model = Transformer(11, d_model=16, d_ff=32, n_layers=2, n_heads=2, placement="pre", causal=True, max_len=8, seed=0)
    x, y = tokens(4, 8, vocab=11), tokens(4, 8, vocab=11, seed=2)
    wide = sharpness(model.double(), x, y)
    model = model.to(dtype)
    with torch.inference_mode():
        narrow = sharpness(model, x + 0, y)
    assert narrow.replicates.values.dtype == torch.float64
    for kind in wide.types:
        assert narrow.types[kind].value == pytest.approx(wide.types[kind].value, rel=tolerance)


def test_memory_is_forecast(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 1000)
    with pytest.raises(OutOfMemoryError, match=r"the graph of one micro-batch, .* pass a smaller micro_batch"):
        sharpness(tiny(), X, Y)


def batch(vocab=13):
    ids = torch.randint(vocab, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize(
    ("name", "shifted"), [("GPT2LMHeadModel", True), ("BertForMaskedLM", False), ("BertForTokenClassification", False)]
)
def test_labels_stand_where_the_models_own_loss_has_them(name, shifted, tmp_path):
    transformers = pytest.importorskip("transformers")
    gpt = name.startswith("GPT2")
    sizes = (
        {"n_embd": 8, "n_layer": 1, "n_head": 2}
        if gpt
        else {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "num_labels": 13}
    )
    config = getattr(transformers, "GPT2Config" if gpt else "BertConfig")(vocab_size=13, **sizes, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    parts = None if gpt else plain_parts(model)
    report = sharpness(model, batch(), draws=1, parts=parts)
    assert report.terms == 16 - 3 * shifted
    assert sharpness(model, batch(), draws=1, parts=parts, shift=not shifted).terms == 16 - 3 * (not shifted)
    without = batch()
    without["labels"][0] = -100  # a sequence that cannot show it
    assert sharpness(model, without, draws=1, parts=parts, micro_batch=1).terms == 10 - 2 * shifted
    if name.endswith("TokenClassification"):
        return
    model.eval()
    expected = pytest.approx(model(**batch()).loss.item(), rel=1e-5)
    assert Monitor(model, batch(), tmp_path / name, what=()).measure(0)["loss"] == expected


def test_the_inputs_of_a_decoder_are_made_of_the_labels():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "d_model": 8, "d_kv": 4, "d_ff": 10, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).double()
    own = batch()
    whole = {**own, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(own["labels"])}
    for options in ({"kind": "ggn"}, {"draws": 2, "micro_batch": 2}):
        pair = ({key: x for key, x in own.items() if key != "labels"}, own["labels"])
        found, expected, again = (sharpness(model, data, **options).types for data in (own, whole, pair))
        assert {k: x.value for k, x in found.items()} == {k: x.value for k, x in expected.items()}
        assert {k: x.value for k, x in again.items()} == {k: x.value for k, x in expected.items()}
