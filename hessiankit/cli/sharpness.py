"""Measure how sharp each block type of a language model is, with error bars.

Draw labels from the model's own predictions on windows of a text, and estimate the average sharpness S of embeddings, queries and
keys, feed-forward networks, values and outputs, norms and head (The Sharpness Disparity Principle, Eqs. 3-4), with standard
errors and intervals. Nothing of the paper's order is assumed. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from hessiankit.cli import parsing
from hessiankit.support.errors import InputError, OutOfMemoryError
from hessiankit.support.tables import Table, say, table

if TYPE_CHECKING:
    from hessiankit.diagnostics.sharpness.sharpness_report import SharpnessReport

EXAMPLES = (
    ("hessiankit sharpness", "a tiny model on Python's standard library"),
    ("hessiankit sharpness --model my_models:make --text notes.txt --layers", "your own model and text, also layer by layer"),
    ("hessiankit sharpness --model path/to/folder --draws 16 --json sharpness.json", "what save_pretrained wrote"),
)
EXACT_PARAMETERS = 500_000  # up to which the exact values are computed
FLOW_TOKENS = 8  # enough to see what flows where


def options(command: parsing.Parser) -> None:
    """Add the options."""
    add = command.add_argument
    parsing.add_model(add, default="tiny")
    text = "stdlib (default): Python's own standard library; or a text file, or a folder of them"
    add("--text", default="stdlib", metavar="PATH", help=text)
    add("--batch", type=parsing.positive, default=8, help="sequences (default 8)")
    add("--length", type=parsing.positive, default=64, help="tokens of each (default 64)")
    add("--draws", type=parsing.positive, default=8, help="draws of the labels, each one backward pass (default 8)")
    add(
        "--micro-batch",
        type=parsing.positive,
        metavar="N",
        help="sequences per forward pass; S is averaged over them (default: all)",
    )
    add("--per", choices=("token", "sequence"), default="token", help="unit of the mean in the loss (default token)")
    add("--confidence", type=parsing.probability, default=0.95, help="confidence level of the intervals (default 0.95)")
    kind = "the type of the parameters whose names a regular expression finds, e.g. 'router=Other' (may be repeated)"
    add("--type", action="append", metavar="REGEX=TYPE", help=kind)
    add("--layers", action="store_true", help="also print S by layer and type")
    add("--tensors", action="store_true", help="also print S of every tensor")
    add("--histograms", action="store_true", help="also print the share of entries that are 0, and write histograms to --json")
    add("--exact", action="store_true", help="also compute the exact values, which takes minutes, and print both")
    add("--seed", type=parsing.seed, default=0, help="random seed of windows, labels and drawn parameters (default 0)")
    parsing.add_arithmetic(add, dtype="float32")
    parsing.add_output(add)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    parsing.check_sources(args)
    types = _overrides(args.type)

    import torch

    from hessiankit.cli.loading import load_model, text_batch
    from hessiankit.cli.module_options import run_once
    from hessiankit.cli.text import load_text
    from hessiankit.diagnostics.sharpness.measure import sharpness
    from hessiankit.partition import model_parts
    from hessiankit.support.environment import environment
    from hessiankit.support.progress import progress_bar

    loaded = load_model(args.model, seed=args.seed, device=args.device, dtype=getattr(torch, args.dtype))
    size = sum(p.numel() for p in loaded.model.parameters())
    if args.exact and size > EXACT_PARAMETERS:
        why = f"expected at most {EXACT_PARAMETERS:,}: leave --exact out, or take a smaller model"
        raise InputError(f"sharpness: --exact of {loaded.name}, which has {size:,} parameters; {why}")
    text = load_text(args.text)
    inputs, targets = (x.to(args.device) for x in text_batch(loaded, text, args.batch, args.length, seed=args.seed))
    say(f"{loaded}\n{args.batch} sequences of {args.length} {loaded.tokens}, {text.name}, {args.dtype}")
    few = inputs[:1, :FLOW_TOKENS]
    run_once(args, loaded.model, few)
    measured = {"per": args.per, "parts": model_parts(loaded.model, inputs=few, overrides=types)}
    drawn = {name: getattr(args, name) for name in ("draws", "micro_batch", "confidence", "histograms", "seed")}
    try:
        with progress_bar() as tell:
            report = sharpness(loaded.model, inputs, targets, progress=tell, **measured, **drawn)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(str(error).replace("a smaller micro_batch", "--micro-batch, or a smaller one")) from error
    exact = sharpness(loaded.model, inputs, targets, exact=True, **measured) if args.exact else None
    numbers = {
        "model": {"name": loaded.name, "class": type(loaded.model).__name__, "origin": loaded.origin},
        **{name: getattr(args, name) for name in ("text", "batch", "length", "dtype", "device")},
        "sharpness": report,
        "exact": exact,
        "environment": environment(),
    }
    parsing.finish(args, report, numbers)
    if args.layers:
        say(_layers(report), whole=True)
    if args.tensors:
        say(_tensors(report), whole=True)
    if exact is not None:
        say(_beside(report, exact), whole=True)


def _overrides(texts: list[str] | None) -> dict[str, str] | None:
    """Return the types that are given by hand; the last ``=`` ends the expression."""
    pairs = [text.rpartition("=") for text in texts or ()]
    for expression, _, kind in pairs:
        if not expression or not kind:
            raise InputError(f"sharpness: --type {expression or kind!r}; expected REGEX=TYPE, such as 'router=Other'")
    return {expression: kind for expression, _, kind in pairs} or None


def _layers(report: SharpnessReport) -> Table:
    """Return S by layer and type."""
    rows = []
    for layer, whole in report.layers.items():
        ones = [whole, *(report.type_layers.get((kind, layer)) for kind in report.types)]
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
        apart = f"{(one.value - true) / one.standard_error:+.2f}" if one.standard_error > 0 else one.shown[0]
        inside = ("yes" if one.low <= true <= one.high else "no") if not math.isnan(one.low) else "n.a."
        rows.append((kind, f"{one.value:.4g}", f"{true:.6g}", apart, inside))
    return table(("type", "S", "exact", "s.e. apart", "in the interval"), rows, title="beside the exact Gauss-Newton trace")
