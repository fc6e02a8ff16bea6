"""Rates that something else overwrote, and state dicts: both are noticed before a step is taken."""

from __future__ import annotations

import io

import pytest
import torch
from blockwise_reference import Split, difference, encoder, train, with_gradients
from torch.optim import lr_scheduler

import hessiankit as hk
from hessiankit.optim import blockwise_lr, blockwise_schedule, check_groups

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


SCHEDULERS = {
    "LambdaLR": (lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 3)), True),
    "cosine to 0": (lambda o: lr_scheduler.CosineAnnealingLR(o, 4), True),
    "linear": (lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3), True),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.9), True),
    "cosine to one floor": (lambda o: lr_scheduler.CosineAnnealingLR(o, 4, eta_min=5e-4), False),
    "one cycle with one peak": (lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=9, cycle_momentum=False), False),
    "cyclic with one base": (lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-3, 3, cycle_momentum=False), False),
}


@pytest.mark.parametrize(("make", "keeps"), SCHEDULERS.values(), ids=SCHEDULERS)
def test_torchs_schedulers(make, keeps):
    """Those that multiply every group's own rate pass; those that write rates of their own do not."""
    _, optimizer = ready()
    scheduler = make(optimizer)

    def steps():
        for _ in range(5):
            optimizer.step()
            scheduler.step()

    if keeps:
        steps()
    else:
        with pytest.raises(hk.InputError, match="A scheduler or a loop has written them"):
            steps()


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
