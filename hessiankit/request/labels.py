"""The labels of a batch of keyword arguments, as Hugging Face's collators make it: taken out, and laid beside the logits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.request.calling import IGNORE_INDEX, call, member
from hessiankit.support.errors import InputError

SAME = 1e-4
"""Relative difference up to which the model's own loss counts as the one that we compute from its logits."""


def labels_of(who: str, name: str, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a mapping without its labels, and the labels; ``name`` is that of the batch in a message.

    Raises:
        InputError: It has none.
    """
    labels = inputs.get("labels")
    if labels is None:
        keys = ", ".join(map(repr, inputs)) or "none"
        raise InputError(
            f"{who}: {name} is a mapping without 'labels' (keys: {keys}); add them, e.g. batch['labels'] = batch['input_ids']"
            " with -100 at padding, or pass a pair (mapping, target)"
        )
    return {key: value for key, value in inputs.items() if key != "labels"}, labels


def with_decoder_inputs(model: nn.Module | None, inputs: Any, labels: Tensor) -> Any:
    """Return the inputs, with those of the decoder where a Hugging Face model makes them of the labels."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is None or labels.ndim < 2 or not isinstance(inputs, Mapping):
        return inputs
    if {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        return inputs
    return {**inputs, "decoder_input_ids": make(labels=labels)}


def with_a_label(labels: Tensor) -> Tensor:
    """Return the numbers of the samples, rows of axis 0, that have a label, on the CPU.

    >>> with_a_label(torch.tensor([[-100, -100], [3, -100]])).tolist()
    [1]
    """
    return (labels != IGNORE_INDEX).flatten(1).any(1).nonzero()[:, 0].cpu()


def one_later(labels: Tensor) -> Tensor:
    """Return the labels for logits t that are those of place t + 1, and -100 for the last one.

    >>> one_later(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return torch.cat([labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), IGNORE_INDEX)], -1)


@torch.no_grad()
def are_later(who: str, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> bool | None:
    """Tell whether the model's own loss compares logits t with label t + 1, as a language model does; None where it has no loss
    of these labels.
    """
    known = inspect.signature(model.forward).parameters
    takes = "labels" in known or any(p.kind is p.VAR_KEYWORD for p in known.values())
    outputs = call(who, model, {**inputs, "labels": labels} if takes else inputs)
    logits = outputs if isinstance(outputs, Tensor) else member(outputs, "logits")
    loss = getattr(outputs, "loss", None)
    fits = logits is not None and labels.shape == logits.shape[:-1] and labels.shape[-1] > 1 and not labels.is_floating_point()
    if logits is None or not fits or not isinstance(loss, Tensor) or loss.numel() != 1 or not bool(loss.isfinite()):
        return None
    wide = logits.double()
    ways = {
        True: F.cross_entropy(wide[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten(), ignore_index=IGNORE_INDEX),
        False: F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX),
    }
    away = {way: abs(float(own) - float(loss)) / max(abs(float(loss)), 1e-30) for way, own in ways.items()}
    return not (away[False] < SAME and not away[True] < away[False])
