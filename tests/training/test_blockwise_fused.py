"""Slices of one tensor with rates of their own: the same digits as split parameters, with every implementation of a step."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from blockwise_reference import EQ_5, D, Lion, Split, batch, difference, encoder, train, with_gradients
from torch import nn

import hessiankit as hk
from hessiankit.training.optim import blockwise_lr, blockwise_schedule
from hessiankit.training.optim.steps import _slices
from hessiankit.training.partition import Part

LR = 3e-3


def sgd(groups):
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True)


STEPS = {
    "AdamW, one tensor at a time": lambda groups: torch.optim.AdamW(groups, foreach=False),
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "Adam, L2, amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "SGD": sgd,
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5),
    **{name: getattr(torch.optim, name) for name in ("NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta")},
    "Lion": Lion,
}


def decayed(kind, ratio):
    return 0.0 if kind == "Norm" else 0.1


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_slices_take_the_steps_of_split_parameters(make):
    model = encoder()
    split = Split(encoder())
    train(model, make(blockwise_lr(model, LR)))
    train(split, make(split.groups(LR, decayed)))
    assert difference(model, split.values()) <= 1e-12
    plain = encoder()
    train(plain, make(blockwise_lr(plain, LR, "none")))
    assert difference(model, dict(plain.named_parameters())) > 1e-3


@pytest.mark.parametrize("name", ["AdamW, foreach", "AdamW, fused"])
def test_decay_by_type_at_one_rate(name):
    model, split, decay, one = encoder(), Split(encoder()), {"QK": 0.3, "VO": 0.05}, dict.fromkeys(EQ_5, 1.0)
    train(model, STEPS[name](blockwise_lr(model, LR, one, decay=decay)), 5)
    train(split, STEPS[name](split.groups(LR, lambda kind, ratio: decay.get(kind, decayed(kind, ratio)), one)), 5)
    assert difference(model, split.values()) <= 1e-12


def test_half_precision_keeps_what_the_large_step_kept():
    """The group has the largest rate, so that a slice's step is never the enlarged rounding of a small one."""
    model = encoder().bfloat16()
    groups = blockwise_lr(model, 1e-3)
    factors = {piece["factor"] for g in groups for cuts in g.get("slices", ()) for piece in cuts["pieces"]}
    assert factors == {1.0, 0.5}
    p = model.self_attn.in_proj_weight
    before = p.detach().clone()
    optimizer = torch.optim.AdamW(groups)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p[2 * D :], torch.lerp(before, plain_step(before), 0.5)[2 * D :])


def plain_step(before):
    p = nn.Parameter(before.clone())
    p.grad = torch.ones_like(p)
    torch.optim.AdamW([p], 8e-3, weight_decay=0.1).step()
    return p.detach()


def test_a_closure_and_a_copy():
    model, split = encoder(), Split(encoder())
    optimizer = torch.optim.AdamW(blockwise_lr(model, LR))
    reference = torch.optim.AdamW(split.groups(LR, decayed))
    train(split, reference, 3)
    for step in range(3):
        x, y = batch(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert difference(model, split.values()) <= 1e-12
    other, twin = copy.deepcopy((model, optimizer))  # an optimizer's own hooks are lost here
    train(other, twin, 3)
    train(split, reference, 3)
    assert difference(other, split.values()) <= 1e-12


def test_a_step_that_gradscaler_skips_moves_nothing():
    model = encoder().float()
    for fused in (False, True):
        optimizer = torch.optim.AdamW(blockwise_lr(model, LR, couple_decay=False), fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.full_like(p, float("inf"))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        with_gradients(model)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_parameter_without_a_gradient_is_left_alone():
    model = encoder()
    optimizer = torch.optim.AdamW(blockwise_lr(model, LR, couple_decay=False))
    before = model.self_attn.in_proj_weight.detach().clone()
    model.linear1.weight.grad = torch.ones_like(model.linear1.weight)
    optimizer.step()
    assert torch.equal(model.self_attn.in_proj_weight, before)


def test_an_optimizer_around_the_optimizer_rescales_once():
    class Around(torch.optim.Optimizer):
        """As Lookahead and the like: its groups are those of the optimizer inside."""

        def __init__(self, inside):
            super().__init__([{"params": [nn.Parameter(torch.ones(1))]}], {})
            self.inside = inside
            self.param_groups = inside.param_groups

        def step(self, closure=None):
            return self.inside.step(closure)

    model, split = encoder(), Split(encoder())
    train(model, Around(torch.optim.AdamW(blockwise_lr(model, LR))), 4)
    train(split, torch.optim.AdamW(split.groups(LR, decayed)), 4)
    assert difference(model, split.values()) <= 1e-12
    gc.collect()
    assert not any(_slices.values())


def test_a_schedule_reaches_the_slices():
    """One rate for all before the switch and one floor for all: the rates of the reference are written before every step."""
    model, split = encoder(), Split(encoder())
    optimizer = torch.optim.AdamW(blockwise_lr(model, LR))
    schedule = blockwise_schedule(optimizer, warmup=4, steps=16, ramp="switch", floor="common", final=0.1)
    train(model, optimizer, 20, schedule.step)
    reference = torch.optim.AdamW(split.groups(LR, decayed))
    rates = [group["lr"] for group in reference.param_groups]
    for step in range(20):
        decay = (1 + math.cos(math.pi * min(1.0, (step - 4) / 12))) / 2
        for group, rate in zip(reference.param_groups, rates, strict=True):
            group["lr"] = LR * (step + 1) / 5 if step < 4 else 0.1 * LR + (rate - 0.1 * LR) * decay
        train(split, reference, step + 1, first=step)
    assert difference(model, split.values()) <= 1e-12


def test_a_copy_of_the_weights_is_refused():
    """An optimizer with float32 master weights writes its parameters from them, and would forget the rescaling."""

    class Master(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("master_param", p.float().clone())
                    p.copy_(master.sub_(group["lr"] * p.grad))

    model = encoder().bfloat16()
    optimizer = Master(blockwise_lr(model, LR), {"lr": LR})
    with_gradients(model)
    with pytest.raises(hk.InputError, match="Master keeps the weights of a fused tensor a second time, as 'master_param'"):
        optimizer.step()


def test_what_cannot_be_exact_is_refused():
    def stepped(make, **options):
        model = encoder()
        optimizer = make(blockwise_lr(model, LR, **options))
        with_gradients(model)
        optimizer.step()

    for make in (torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor):
        with pytest.raises(hk.InputError, match=f"the step of {make.__name__} is not linear in its rate"):
            stepped(make)
    for make in (sgd, torch.optim.Adam, torch.optim.RMSprop):
        with pytest.raises(hk.InputError, match="adds the decay to the gradient of the whole tensor"):
            stepped(make, couple_decay=False)
    with pytest.raises(ValueError, match="LBFGS"):
        torch.optim.LBFGS(blockwise_lr(encoder(), LR))
    with pytest.raises(hk.InputError, match="optimizer='lbfgs' has one rate"):
        blockwise_lr(encoder(), LR, optimizer="lbfgs")
    model = encoder()
    optimizer = torch.optim.AdamW(blockwise_lr(model, LR))
    flat = model.self_attn.in_proj_weight
    flat.data = flat.data.flatten()  # as a wrapper that shards parameters does
    with pytest.raises(hk.InputError, match=r"is now a Parameter of shape \(48,\), not sharded; expected \(12, 4\)"):
        optimizer.step()


class OneTensor(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.fused = nn.Parameter(value)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards(axis, dim):
    """Every rank of three rescales the rows that it holds, also where a shard has several slices, or none that is rescaled."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    value = torch.arange(56.0, dtype=torch.float64).reshape(7, 8).sin()
    gradient = torch.arange(56.0, dtype=torch.float64).reshape(7, 8).cos()
    end = value.shape[axis]
    cuts = {"QK": ((0, 2), (4, 5)), "VO": ((2, 4), (5, end))}
    parts = [Part("fused", kind, "", 0, "", 0, axis, segments) for kind, segments in cuts.items()]

    def stepped(p, g):
        model = OneTensor(p)
        optimizer = torch.optim.AdamW(blockwise_lr(model, 0.1, parts=parts, couple_decay=False), foreach=False)
        model.fused.grad = g
        optimizer.step()
        return model.fused.detach()

    whole = stepped(value.clone(), gradient)
    for rank in range(3):
        distributed.init_process_group("fake", rank=rank, world_size=3, store=fake.FakeStore())
        try:
            mesh = init_device_mesh("cpu", (3,), mesh_dim_names=(f"rank {rank}",))  # torch keeps equal meshes, with their rank
            sharded = [distribute_tensor(t.clone(), mesh, [Shard(dim)], src_data_rank=None) for t in (value, gradient)]
            local = stepped(*sharded).to_local()
        finally:
            distributed.destroy_process_group()
        torch.testing.assert_close(local, whole.chunk(3, dim)[rank], rtol=1e-14, atol=1e-15)


def test_equal_ratios_need_no_rescaling():
    model = encoder()
    optimizer = torch.optim.Rprop(blockwise_lr(model, LR, {"QK": 4.0, "VO": 4.0}))
    with_gradients(model)
    optimizer.step()
