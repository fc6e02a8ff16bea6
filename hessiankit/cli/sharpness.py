"""``hessiankit sharpness``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from hessiankit.cli.options import Device, Dtype, Flag, Output, Positive, Probability, Seed, check_sources
from hessiankit.cli.program import command
from hessiankit.support.errors import InputError, OutOfMemoryError
from hessiankit.support.tables import Table, say, table

if TYPE_CHECKING:
    from hessiankit.training.sharpness.sharpness_report import SharpnessReport

EXAMPLES = (
    ("hessiankit sharpness", "a tiny model on Python's standard library"),
    ("hessiankit sharpness --model my_models:make --text notes.txt --layers", "your own model and text, also layer by layer"),
    ("hessiankit sharpness --model path/to/folder --draws 16 --json sharpness.json", "what save_pretrained wrote"),
)
EXACT_PARAMETERS = 500_000  # up to which the exact values are computed
FLOW_TOKENS = 8  # enough to see what flows where
app = command("sharpness", EXAMPLES)


@app.default
def run(
    *,
    model: str = "tiny",
    text: str = "stdlib",
    batch: Positive = 8,
    length: Positive = 64,
    draws: Positive = 8,
    micro_batch: Positive | None = None,
    per: Literal["token", "sequence"] = "token",
    confidence: Probability = 0.95,
    kinds: Annotated[list[str] | None, Parameter(name="--type")] = None,
    layers: Flag = False,
    tensors: Flag = False,
    histograms: Flag = False,
    exact: Flag = False,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    output: Output = Output(),
) -> None:
    """Measure how sharp each block type of a language model is, with error bars.

    Draw labels from the model's own predictions on windows of a text, and estimate the average sharpness S of embeddings,
    queries and keys, feed-forward networks, values and outputs, norms and head (The Sharpness Disparity Principle, Eqs. 3-4),
    with standard errors and intervals. Nothing of the paper's order is assumed. Nothing is downloaded.

    Args:
        model: tiny: 3 blocks, bytes; a folder of save_pretrained; a config.json; module:function.
        text: stdlib: Python's own standard library; or a text file, or a folder of them.
        batch: Sequences.
        length: Tokens of each.
        draws: Draws of the labels, each one backward pass.
        micro_batch: Sequences per forward pass; S is averaged over them (default: all).
        per: Unit of the mean in the loss.
        confidence: Confidence level of the intervals.
        kinds: REGEX=TYPE, the type of parameters whose names a regular expression finds, e.g. `router=Other` (may be repeated).
        layers: Also print S by layer and type.
        tensors: Also print S of every tensor.
        histograms: Also print the share of entries that are 0, and write histograms to --json.
        exact: Also compute the exact values, which takes minutes, and print both.
    """
    check_sources(model, text)
    types = _overrides(kinds)

    import torch

    from hessiankit.cli.loading import load_model, text_batch
    from hessiankit.cli.loss_problem import run_on_text
    from hessiankit.cli.text import load_text
    from hessiankit.support.environment import environment
    from hessiankit.support.progress import progress_bar
    from hessiankit.training.partition import model_parts
    from hessiankit.training.sharpness.measure import sharpness

    loaded = load_model(model, seed=seed, device=device, dtype=getattr(torch, dtype))
    size = sum(p.numel() for p in loaded.model.parameters())
    if exact and size > EXACT_PARAMETERS:
        why = f"expected at most {EXACT_PARAMETERS:,}: leave --exact out, or take a smaller model"
        raise InputError(f"--exact of {loaded.name}, which has {size:,} parameters; {why}")
    windows = load_text(text)
    inputs, targets = (x.to(device) for x in text_batch(loaded, windows, batch, length, seed=seed))
    say(f"{loaded}\n{batch} sequences of {length} {loaded.tokens}, {windows.name}, {dtype}")
    sample = inputs[:1, :FLOW_TOKENS]
    run_on_text(loaded.model, sample, model, "name a language model, which does")
    subject: dict[str, Any] = {"per": per, "parts": model_parts(loaded.model, inputs=sample, overrides=types)}
    sampling: dict[str, Any] = {"draws": draws, "micro_batch": micro_batch, "confidence": confidence, "histograms": histograms}
    try:
        with progress_bar() as tell:
            report = sharpness(loaded.model, inputs, targets, seed=seed, progress=tell, **subject, **sampling)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(str(error).replace("a smaller micro_batch", "--micro-batch, or a smaller one")) from error
    truth = sharpness(loaded.model, inputs, targets, exact=True, **subject) if exact else None
    numbers = {
        "model": {"name": loaded.name, "class": type(loaded.model).__name__, "origin": loaded.origin},
        **{"text": text, "batch": batch, "length": length, "dtype": dtype, "device": device},
        "sharpness": report,
        "exact": truth,
        "environment": environment(),
    }
    output.finish(report, numbers)
    if layers:
        say(_layers(report), whole=True)
    if tensors:
        say(_tensors(report), whole=True)
    if truth is not None:
        say(_beside(report, truth), whole=True)


def _overrides(texts: list[str] | None) -> dict[str, str] | None:
    """Return the types that are given by hand; the last ``=`` ends the expression."""
    pairs = [text.rpartition("=") for text in texts or ()]
    for expression, _, kind in pairs:
        if not expression or not kind:
            raise InputError(f"--type {expression or kind!r}; expected REGEX=TYPE, such as 'router=Other'")
    return {expression: kind for expression, _, kind in pairs} or None


def _layers(report: SharpnessReport) -> Table:
    """Return S by layer and type."""
    rows = []
    for layer, total in report.layers.items():
        ones = [total, *(report.type_layers.get((kind, layer)) for kind in report.types)]
        rows.append(("outside" if layer is None else str(layer), *("" if one is None else f"{one.value:.3g}" for one in ones)))
    return table(("layer", "all", *report.types), rows, title="S by layer and type")


def _tensors(report: SharpnessReport) -> Table:
    """Return S of every tensor, or part of a fused one."""
    kinds = {part.name: part.type for part in report.replicates.parts}
    rows = [(name, kinds[name], f"{one.entries:,}", f"{one.value:.4g}", one.shown[1]) for name, one in report.tensors.items()]
    headers = ("tensor", "type", "entries", "S", f"{report.confidence:.0%} interval")
    return table(headers, rows, title="S by tensor", left=2, names=report.tensors)


def _beside(report: SharpnessReport, exact: SharpnessReport) -> Table:
    """Return estimates beside exact values, and how many standard errors they are apart."""
    rows = []
    for kind, one in report.types.items():
        true = exact.types[kind].value
        distance = f"{(one.value - true) / one.standard_error:+.2f}" if one.standard_error > 0 else one.shown[0]
        verdict = ("yes" if one.low <= true <= one.high else "no") if not math.isnan(one.low) else "n.a."
        rows.append((kind, f"{one.value:.4g}", f"{true:.6g}", distance, verdict))
    return table(("type", "S", "exact", "s.e. apart", "in the interval"), rows, title="beside the exact Gauss-Newton trace")
