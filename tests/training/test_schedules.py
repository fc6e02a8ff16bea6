"""Group-aware schedules, resuming with the same digits, and rates that something else overwrote, noticed before a step."""

from __future__ import annotations

import io
import math
from contextlib import nullcontext

import pytest
import torch
from blockwise_reference import Split, difference, encoder, train, with_gradients
from torch import nn
from torch.optim import lr_scheduler

import hessiankit as hk
from hessiankit.training.optim import blockwise_lr, blockwise_schedule, check_groups

BASE = 6e-4
RATIO = {"Emb": 10.0, "QK": 8.0, "FFN": 6.0, "VO": 4.0, "Norm": 1.0}


def language_model():
    return hk.Transformer(5, 4, 6, 1, 2, seed=0)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("ramp", ["direct", "switch"])
@pytest.mark.parametrize("floor", ["scaled", "common"])
def test_rates_by_their_formula(kind, ramp, floor):
    optimizer = torch.optim.SGD(blockwise_lr(language_model(), BASE, weight_decay=0.0))
    schedule = blockwise_schedule(optimizer, kind=kind, ramp=ramp, floor=floor, warmup=4, steps=18, final=0.1)
    start = 4 if kind == "cosine" else 12  # two thirds of the steps
    for step in range(22):
        done = min(max(step - start, 0) / (18 - start), 1)
        share = (1 + math.cos(math.pi * done)) / 2 if kind == "cosine" else 1 - done
        for group in optimizer.param_groups:
            r = RATIO[group["block_type"]]
            low = 0.1 * BASE * (r if floor == "scaled" else 1)
            ramped = BASE * (r if ramp == "direct" else 1) * (step + 1) / 5
            assert group["lr"] == pytest.approx(ramped if step < 4 else low + (r * BASE - low) * share, rel=1e-12)
        optimizer.step()
        schedule.step()


def test_the_last_rate_is_a_twentieth_of_a_cosine_and_nothing_of_a_linear_decay():
    optimizer = torch.optim.SGD(blockwise_lr(language_model(), BASE))
    for kind, last in (("cosine", 1 / 20), ("wsd", 0.0)):
        assert blockwise_schedule(optimizer, kind=kind, warmup=1, steps=9).rate(3.0, 2.0, 9) == pytest.approx(6 * last)


def test_groups_that_are_not_blockwise_follow_with_ratio_1():
    extra = nn.Parameter(torch.ones(2))
    groups = [*blockwise_lr(language_model(), BASE), {"params": [extra], "lr": 0.5, "param_names": ["extra"]}]
    optimizer = torch.optim.AdamW(groups)
    schedule = blockwise_schedule(optimizer, warmup=1, steps=3, final=0.1)
    assert [group["lr"] for group in optimizer.param_groups][-1] == 0.25
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups][-1] == pytest.approx(0.05)


@pytest.mark.parametrize("ramp", ["direct", "switch"])
@pytest.mark.parametrize("stop", [2, 7])
def test_resumed_with_the_same_digits(ramp, stop):
    """Model, optimizer and schedule through torch.save and torch.load(weights_only=True), before and after the switch."""

    def made():
        model = encoder()
        optimizer = torch.optim.AdamW(blockwise_lr(model, 1e-2))
        return model, optimizer, blockwise_schedule(optimizer, warmup=4, steps=12, ramp=ramp, floor="common")

    whole, optimizer, schedule = made()
    train(whole, optimizer, 12, schedule.step)
    first, optimizer, schedule = made()
    train(first, optimizer, stop, schedule.step)
    file = io.BytesIO()
    torch.save([first.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, optimizer, schedule = made()
    for thing, state in zip((second, optimizer, schedule), saved, strict=True):
        thing.load_state_dict(state)
    train(second, optimizer, 12, schedule.step, first=stop)
    assert difference(whole, dict(second.named_parameters())) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "linear"}, "kind='linear' is not known; did you mean 'cosine'"),
        ({"ramp": "jump"}, "ramp='jump' is not known; choose one of direct, switch"),
        ({"floor": "none"}, "floor='none' is not known; choose one of scaled, common"),
        ({"warmup": 9}, "warmup=9 and steps=9; expected 0 <= warmup < steps"),
        ({"final": 1.5}, "final=1.5 and stable=0.6667; expected fractions"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    optimizer = torch.optim.AdamW(blockwise_lr(language_model(), BASE))
    with pytest.raises(hk.InputError, match=f"blockwise_schedule: {message}"):
        blockwise_schedule(optimizer, **{"warmup": 1, "steps": 9, **options})


def test_an_optimizer_without_block_types():
    optimizer = torch.optim.AdamW(language_model().parameters())
    with pytest.raises(hk.InputError, match="no group of the AdamW has a block type; build it from blockwise_lr"):
        blockwise_schedule(optimizer, warmup=1, steps=9)


LR = 1e-3


def ready(**options):
    """A model with gradients and an optimizer of its groups."""
    model = with_gradients(encoder())
    return model, torch.optim.AdamW(blockwise_lr(model, LR, **options))


def as_nano_gpt(optimizer, lr=6e-4):
    for group in optimizer.param_groups:
        group["lr"] = lr


def test_a_loop_that_puts_one_rate_into_every_group():
    model, optimizer = ready()
    before = model.linear1.weight.detach().clone()
    as_nano_gpt(optimizer)
    message = "AdamW's groups QK.VO and VO are 0.0006 and 0.0006; expected the first to be 2 times the second.*group\\['ratio'\\]"
    with pytest.raises(hk.InputError, match=message):
        optimizer.step()
    assert torch.equal(model.linear1.weight, before)
    for group in optimizer.param_groups:  # what the message says
        group["lr"] = 6e-4 * group["ratio"]
    optimizer.step()
    assert not torch.equal(model.linear1.weight, before)


def test_warn_and_off():
    _, optimizer = ready(guard="warn")
    as_nano_gpt(optimizer)
    with pytest.warns(UserWarning, match="expected the first to be 2 times the second"):
        optimizer.step()
    _, optimizer = ready(guard="off")
    as_nano_gpt(optimizer)
    optimizer.step()


def test_torchs_schedulers_of_every_groups_own_rate_pass_and_one_floor_for_all_does_not():
    for floor, fails in ((0.0, False), (5e-4, True)):
        _, optimizer = ready()
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 4, eta_min=floor)
        with pytest.raises(hk.InputError, match="A scheduler or a loop has written them") if fails else nullcontext():
            for _ in range(5):
                optimizer.step()
                scheduler.step()


def test_the_guard_follows_the_schedule():
    """One rate for all is right before the switch and wrong after it."""
    _, optimizer = ready()
    schedule = blockwise_schedule(optimizer, warmup=2, steps=6, ramp="switch")
    as_nano_gpt(optimizer)
    optimizer.step()
    schedule.step()
    optimizer.step()
    schedule.step()
    optimizer.step()
    as_nano_gpt(optimizer)
    with pytest.raises(hk.InputError, match="2 times the second"):
        optimizer.step()


def test_a_rate_on_another_device_is_not_read():
    """That would wait for the device in every step."""
    _, optimizer = ready()
    as_nano_gpt(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(6e-4, device="meta")  # which has no value to read
    check_groups(optimizer)


def test_a_rate_of_zero_is_in_every_proportion():
    _, optimizer = ready()
    as_nano_gpt(optimizer, 0.0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.raises(hk.InputError, match="expected the first"):
        optimizer.step()


def test_tensor_rates():
    model, split = encoder(), Split(encoder())
    groups, reference = blockwise_lr(model, LR), split.groups(LR, lambda kind, ratio: 0.0 if kind == "Norm" else 0.1)
    for group in (*groups, *reference):
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    train(model, torch.optim.AdamW(groups, foreach=False), 3)
    train(split, torch.optim.AdamW(reference, foreach=False), 3)
    assert difference(model, split.values()) <= 1e-12
    groups[0]["lr"].mul_(2)
    with pytest.raises(hk.InputError, match="A scheduler or a loop"):
        train(model, torch.optim.AdamW(groups, foreach=False), 1)


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_state_dict_carries_everything():
    model, optimizer = ready(couple_decay=False, decay={"VO": 0.02})
    optimizer.step()
    other = torch.optim.AdamW(blockwise_lr(model, 7.0, "none"))
    other.load_state_dict(saved(optimizer))
    for a, b in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}
    assert any("slices" in group for group in other.param_groups)


def test_a_state_dict_of_other_groups():
    model = encoder()
    optimizer = torch.optim.AdamW(blockwise_lr(model, LR))
    check_groups(optimizer)
    state = saved(optimizer)
    names = next(g["param_names"] for g in state["param_groups"] if g["block_type"] == "FFN")
    names.reverse()  # as a model would have them that defines its layers in another order
    optimizer.load_state_dict(state)
    before = [p.detach().clone() for p in model.parameters()]
    with_gradients(model)
    message = r"say 'linear2.weight' \(FFN\) where the parameter is 'linear1.weight'; expected the same model in the same order"
    with pytest.raises(hk.InputError, match=message):
        check_groups(optimizer)
    with pytest.raises(hk.InputError, match=message):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_names_of_wrappers_do_not_count():
    model = encoder()
    optimizer = torch.optim.AdamW(blockwise_lr(model, LR))
    state = saved(optimizer)
    for group in state["param_groups"]:
        group["param_names"] = [f"module._orig_mod.{name}" for name in group["param_names"]]
    optimizer.load_state_dict(state)
    check_groups(optimizer)


def test_optimizers_without_blockwise_groups_are_passed_over():
    model = encoder()
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 10.0**-k} for k, p in enumerate(model.parameters())])
    train(model, optimizer, 2)
    check_groups(optimizer)
