"""The groups in the hands of others: Muon, Adam-mini, Hugging Face's Trainer, Lightning."""

from __future__ import annotations

import pytest
import torch
from blockwise_reference import D, encoder, with_gradients
from torch import nn

import hessiankit as hk
from hessiankit.optim import blockwise_lr, blockwise_schedule, check_groups


def language_model():
    return hk.Transformer(7, 4, 6, 1, 2, bias=True, tied=False, seed=0)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    model = language_model()
    groups = blockwise_lr(model, 1e-3, optimizer="muon", muon_lr=0.02)
    assert [*groups.muon, *groups.adamw] == [g for flag in (True, False) for g in groups if g["use_muon"] is flag]
    assert {(g["block_type"], g["lr"]) for g in groups.muon} == {("QK", 0.02), ("VO", 0.02), ("FFN", 0.02)}
    assert all(p.ndim == 2 for g in groups.muon for p in g["params"])
    assert {g["block_type"]: g["lr"] for g in groups.adamw} == {"Emb": 1e-2, "FFN": 6e-3, "Norm": 1e-3, "Head": 1e-3}
    with_gradients(model)
    for optimizer in (torch.optim.Muon(groups.muon), torch.optim.AdamW(groups.adamw)):
        schedule = blockwise_schedule(optimizer, warmup=1, steps=4)
        optimizer.step()
        schedule.step()
        check_groups(optimizer)
    given = blockwise_lr(model, 1e-3, {"QK": 2.0, "Emb": 5.0}, optimizer="muon", muon_lr=0.02)
    assert {g["block_type"]: g["lr"] for g in given.muon} == {"QK": 0.04, "VO": 0.02, "FFN": 0.02}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_orthogonalises_a_fused_tensor_whole():
    """A slice gets its rate of the whole tensor's step; that is not the step of a tensor of its own."""
    model, plain = encoder(), encoder()
    rated = blockwise_lr(model, 1e-3, {"QK": 2.0, "VO": 1.0}, optimizer="muon").muon
    fused = [g for g in rated if g["block_type"] == "QK+VO"]
    before = model.self_attn.in_proj_weight.detach().clone()
    for m, optimizer in ((model, torch.optim.Muon(fused)), (plain, torch.optim.Muon([plain.self_attn.in_proj_weight], 2e-3))):
        m.self_attn.in_proj_weight.grad = torch.arange(12.0 * D).reshape(12, D).sin().double()
        optimizer.step()
    step, whole = (m.self_attn.in_proj_weight.detach() - before for m in (model, plain))
    torch.testing.assert_close(step[: 2 * D], whole[: 2 * D], rtol=0, atol=0)
    torch.testing.assert_close(step[2 * D :], whole[2 * D :] / 2, rtol=1e-12, atol=1e-16)


class Strict(torch.optim.SGD):
    """As MuonWithAuxAdam of the reference implementation: no other keys, and an order of its own."""

    def __init__(self, groups):
        for group in groups:
            assert set(group) == {"params", "lr", "weight_decay", "use_muon"}
            group["params"] = sorted(group["params"], key=lambda p: p.numel(), reverse=True)
        super().__init__(groups)


def test_an_optimizer_that_refuses_other_keys():
    model = encoder()
    groups = blockwise_lr(model, 1e-3, optimizer="muon", muon_lr=0.02)
    optimizer = groups.apply(Strict(groups.bare()))
    names = {id(p): name for name, p in model.named_parameters()}
    for ours, theirs in zip(groups, optimizer.param_groups, strict=True):
        assert theirs["param_names"] == [names[id(p)] for p in theirs["params"]]
        assert (theirs["block_type"], theirs["lr"]) == (ours["block_type"], ours["lr"])
    with_gradients(model)
    optimizer.step()
    assert set(groups.bare()[0]) == {"params", "lr", "weight_decay", "use_muon"}


class ByName(torch.optim.AdamW):
    """As adam_mini.Adam_mini 1.1: takes (name, parameter), makes one group of each, and one rate and decay for all."""

    def __init__(self, named_parameters, lr=1e-3, weight_decay=0.0):
        groups = [{"name": name, "params": p, "weight_decay": weight_decay} for name, p in named_parameters if p.requires_grad]
        super().__init__(groups, lr)


def test_adam_mini_has_a_group_for_each_parameter():
    model = encoder()
    groups = blockwise_lr(model, 1e-3, optimizer="adam-mini")
    assert [g["name"] for g in groups] == [g["param_names"][0] for g in groups] == [name for name, _ in model.named_parameters()]
    rate = {"QK+VO": 4e-3, "VO": 4e-3, "FFN": 4e-3, "Norm": 1e-3}
    assert all(g["lr"] == rate[g["block_type"]] for g in groups)
    qk, _, vo = groups[0]["slices"][0]["pieces"]
    assert (qk["factor"], vo["factor"]) == (0.25, 1.0)
    optimizer = groups.apply(ByName(groups.named_parameters(), 1e-3, 0.1))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in groups]
    before = model.self_attn.in_proj_weight.detach().clone()
    with_gradients(model)
    optimizer.step()
    moved = (model.self_attn.in_proj_weight.detach() - before * (1 - 4e-3 * 0.1)).abs().mean(1)
    assert moved[-1] == pytest.approx(4e-3, rel=1e-4)
    check_groups(optimizer)


def test_groups_that_cannot_be_applied():
    model = language_model()
    groups = blockwise_lr(model, 1e-3)
    with pytest.raises(hk.InputError, match="apply: a group of the AdamW mixes parameters of Emb and FFN and Head"):
        groups.apply(torch.optim.AdamW(model.parameters()))
    some = [p for name, p in model.named_parameters() if name != "head.W_C"]
    with pytest.raises(hk.InputError, match=r"apply: the AdamW has no 'head.W_C'; expected the parameters"):
        groups.apply(torch.optim.AdamW([{"params": [p]} for p in some]))
    with pytest.raises(hk.InputError, match="has 1 parameters that are in no group"):
        groups.apply(torch.optim.AdamW([{"params": [p]} for p in [*model.parameters(), nn.Parameter(torch.ones(1))]]))


@pytest.mark.slow
def test_hugging_face_trainer(tmp_path):
    """Trainer with both, on a GPT-2 with fused attention; its checkpoint resumes with the same digits."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8, bos_token_id=1, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    data = [{"input_ids": torch.arange(6).add(k) % 11, "labels": torch.arange(6).add(k) % 11} for k in range(8)]

    def trained(resume=None):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(blockwise_lr(model, 1e-2))
        schedule = blockwise_schedule(optimizer, warmup=1, steps=4, ramp="switch")
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=2, save_steps=2, report_to=[], use_cpu=True, logging_strategy="no",
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))
        trainer.train(resume_from_checkpoint=resume)
        assert {g["block_type"]: g["lr"] for g in optimizer.param_groups}["Emb"] == pytest.approx(10 * 1e-2 / 20)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = trained()
    assert torch.equal(whole, trained(str(tmp_path / "checkpoint-2")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")
    model = encoder()

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return nn.functional.mse_loss(self.model(batch), batch)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(blockwise_lr(self, 1e-2))
            schedule = blockwise_schedule(optimizer, warmup=1, steps=3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 3, D, generator=generator, dtype=torch.float64) for _ in range(3)]
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", default_root_dir=tmp_path, **options)
    trainer.fit(Task(), torch.utils.data.DataLoader(batches, batch_size=None))
    plain = encoder()
    optimizer = torch.optim.AdamW(blockwise_lr(plain, 1e-2))
    schedule = blockwise_schedule(optimizer, warmup=1, steps=3)
    for x in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), x).backward()
        optimizer.step()
        schedule.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 4 / 20)
