"""``hessiankit sharpness``: measure how sharp the block types of a language model are."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from hessiankit.commands.exit_codes import OK
from hessiankit.environment import environment
from hessiankit.errors import InputError, OutOfMemoryError
from hessiankit.estimation.estimate import Estimate
from hessiankit.estimation.exact import exact_sharpness
from hessiankit.estimation.measure import sharpness
from hessiankit.estimation.report import SharpnessReport
from hessiankit.files import write_json
from hessiankit.loading import LoadedModel, load_model, text_batch
from hessiankit.module_options import run_once
from hessiankit.parts import model_parts
from hessiankit.progress import progress_bar
from hessiankit.tables import Table, say, show, table
from hessiankit.text import load_text

EXACT_PARAMETERS = 500_000
"""Parameters up to which the exact values are computed."""
FLOW_TOKENS = 8
"""Tokens that are enough to see what flows where."""


def run_sharpness(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option, a model or a file cannot be used.
    """
    loaded = load_model(args.model, seed=args.seed, device=args.device, dtype=getattr(torch, args.dtype))
    size = sum(p.numel() for p in loaded.model.parameters())
    if args.exact and size > EXACT_PARAMETERS:
        raise InputError(
            f"sharpness: --exact of {loaded.name}, which has {size:,} parameters; expected at most {EXACT_PARAMETERS:,}: leave "
            "--exact out, or take a smaller model"
        )
    text = load_text(args.text)
    inputs, targets = (x.to(args.device) for x in text_batch(loaded, text, args.batch, args.length, seed=args.seed))
    say(f"{loaded}\n{args.batch} sequences of {args.length} {loaded.tokens}, {text.name}, {args.dtype}")
    few = inputs[:1, :FLOW_TOKENS]
    run_once(args, loaded.model, few)
    parts = model_parts(loaded.model, inputs=few, overrides=_overrides(args.type))
    with progress_bar() as tell:
        try:
            report = sharpness(
                loaded.model,
                inputs,
                targets,
                draws=args.draws,
                micro_batch=args.micro_batch,
                per=args.per,
                parts=parts,
                confidence=args.confidence,
                histograms=args.histograms,
                seed=args.seed,
                progress=tell,
            )
        except OutOfMemoryError as error:
            raise OutOfMemoryError(str(error).replace("a smaller micro_batch", "--micro-batch, or a smaller one")) from error
    show(report, args.table)
    if args.layers:
        say(_layers(report), whole=True)
    if args.tensors:
        say(_tensors(report), whole=True)
    exact = exact_sharpness(loaded.model, inputs, targets, per=args.per, parts=parts) if args.exact else None
    if exact is not None:
        say(_beside(report, exact), whole=True)
    if args.json is not None:
        write_json("sharpness", args.json, _found(args, loaded, report, exact))
    return OK


def _overrides(given: list[str] | None) -> dict[str, str] | None:
    """Return the types that are given by hand; the last ``=`` ends the expression."""
    pairs = [text.rpartition("=") for text in given or ()]
    for expression, _, kind in pairs:
        if not expression or not kind:
            raise InputError(f"sharpness: --type {expression or kind!r}; expected REGEX=TYPE, such as 'router=Other'")
    return {expression: kind for expression, _, kind in pairs} or None


def _layers(report: SharpnessReport) -> Table:
    """Return S by layer and type."""
    rows = []
    for layer, whole in report.layers.items():
        cells = [_value(report.type_layers.get((kind, layer))) for kind in report.types]
        rows.append(("outside" if layer is None else str(layer), _value(whole), *cells))
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
        known = one.standard_error > 0
        apart = f"{(one.value - true) / one.standard_error:+.2f}" if known else one.shown[0]
        inside = ("yes" if one.low <= true <= one.high else "no") if not math.isnan(one.low) else "n.a."
        rows.append((kind, f"{one.value:.4g}", f"{true:.6g}", apart, inside))
    return table(("type", "S", "exact", "s.e. apart", "in the interval"), rows, title="beside the exact Gauss-Newton trace")


def _value(one: Estimate | None) -> str:
    return "" if one is None else f"{one.value:.3g}"


def _found(
    args: argparse.Namespace, loaded: LoadedModel, report: SharpnessReport, exact: SharpnessReport | None
) -> dict[str, Any]:
    """Return every number, and where it comes from."""
    return {
        "model": {"name": loaded.name, "class": type(loaded.model).__name__, "origin": loaded.origin},
        **{name: getattr(args, name) for name in ("text", "batch", "length", "dtype", "device")},
        "sharpness": report.to_dict(),
        "exact": None if exact is None else exact.to_dict(),
        "environment": environment(),
    }
