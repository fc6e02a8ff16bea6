"""Hugging Face's batches and models: labels in place, fused tensors in slices, and values that agree with exact ones."""

from __future__ import annotations

import pytest
import torch
from sharpness_cases import plain_parts

from hessiankit import Monitor, depth_diagnostics
from hessiankit.diagnostics.sharpness import sharpness
from hessiankit.partition import model_parts

transformers = pytest.importorskip("transformers")


def gpt2():
    config = transformers.GPT2Config(vocab_size=13, n_embd=8, n_layer=2, n_head=2, n_positions=16, attn_implementation="eager")
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def batch(vocab=13):
    ids = torch.randint(vocab, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture(scope="module")
def measured():
    model = gpt2().double()
    return model, sharpness(model, batch(), draws=60, micro_batch=1), sharpness(model, batch(), exact=True)


def test_gpt2_agrees_with_the_exact_values(measured):
    model, found, wanted = measured
    assert found.terms == wanted.terms == 5 + 5 + 3
    assert set(found.types) == {"Emb", "QK", "VO", "FFN", "Norm"}
    for kind, one in found.types.items():
        assert abs(one.value - wanted.types[kind].value) < 4 * one.standard_error < 0.6 * one.value
    assert sum(one.entries for one in found.types.values()) == sum(p.numel() for p in model.parameters())


def test_slices_of_c_attn_differ(measured):
    _, _, wanted = measured
    kinds = {part.type for part in model_parts(measured[0]) if part.parameter.endswith("h.0.attn.c_attn.weight")}
    assert kinds == {"QK", "VO"}
    assert wanted.type_layers["VO", 0].value > 2 * wanted.type_layers["QK", 0].value


def test_seen_rows(measured):
    _, found, wanted = measured
    tokens, positions = len(batch()["input_ids"].unique()), 6
    assert found.seen_rows.entries == wanted.seen_rows.entries == 8 * (tokens + positions)
    assert abs(found.seen_rows.value - wanted.seen_rows.value) < 4 * found.seen_rows.standard_error


@pytest.mark.parametrize(
    ("name", "shifted"), [("GPT2LMHeadModel", True), ("BertForMaskedLM", False), ("BertForTokenClassification", False)]
)
def test_labels_stand_where_the_models_own_loss_has_them(name, shifted):
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


def test_the_inputs_of_a_decoder_are_made_of_the_labels(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "d_model": 8, "d_kv": 4, "d_ff": 10, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).double()
    own = batch()
    whole = {**own, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(own["labels"])}
    for options in ({"kind": "ggn"}, {"draws": 2, "micro_batch": 2}):
        found, expected = (sharpness(model, data, **options) for data in (own, whole))
        assert {k: x.value for k, x in found.types.items()} == {k: x.value for k, x in expected.types.items()}
    model.eval()
    loss = pytest.approx(model(**own).loss.item(), rel=1e-5)  # T5's norms compute in float32
    assert depth_diagnostics(model, own, what="drop", blocks="decoder.block").drop.loss == loss
    assert Monitor(model, own, tmp_path / "t5", depth=(), eigenvalue=False, sharpness=False).measure(0)["loss"] == loss


def test_sequence_classification_has_one_term_a_sequence():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=13, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertForSequenceClassification(config)
    data = {**batch(), "labels": torch.tensor([0, 1, 1])}
    report = sharpness(model, data, draws=2, parts=plain_parts(model))
    assert (report.terms, report.sequences) == (3, 3)
    assert sharpness(model, data, draws=2, parts=plain_parts(model), per="sequence").types == report.types
