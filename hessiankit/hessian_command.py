"""``hessiankit hessian``: the exact Hessian of a block or of a model, printed, written, drawn."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.block_options import block_of
from hessiankit.commands.exit_codes import FAILED, INTERRUPTED, OK
from hessiankit.commands.hessian import add_hessian
from hessiankit.commands.parsing import Parser
from hessiankit.commands.wording import in_options
from hessiankit.curvature import Hessian, hessian
from hessiankit.disk.forecast import Forecast
from hessiankit.environment import environment
from hessiankit.errors import InputError, OutOfMemoryError
from hessiankit.files import write_json
from hessiankit.loading import load_model, text_batch
from hessiankit.progress import progress_bar
from hessiankit.tables import say, show
from hessiankit.text import load_text

SUFFIXES = (".png", ".svg", ".pdf")
OF_A_BLOCK = (
    *("d_model", "d_ff", "no_affine", "placement", "norm", "activation", "heads", "kv_heads"),
    *("bias", "causal", "rotary", "layer", "layers"),
)
OF_A_MODEL = ("text", "shape")
OPTIONS = ("params", "out", "overwrite")
"""Arguments of :func:`hessiankit.hessian` that are options of the command."""


@dataclass(frozen=True)
class Asked:
    """A model, what goes in, what its output is compared with, and words for both."""

    model: nn.Module
    inputs: Tensor
    target: Tensor
    loss: str
    name: str
    data: str


def run_hessian(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Raises:
        InputError: If an option, a model or a file cannot be used.
        OutOfMemoryError: If the inputs, what the model makes of them, or the matrix do not fit.
    """
    if args.plot is not None and args.plot.suffix not in SUFFIXES:
        raise InputError(f"hessian: cannot draw {args.plot}; name a file that ends in {', '.join(SUFFIXES)}")
    if args.plot is not None and args.dry_run:
        raise InputError("hessian: --plot needs the matrix, which --dry-run does not compute; drop one of them")
    asked = _of_block(args) if args.model is None else _of_model(args)
    say(f"{asked.name}\n{asked.data}; {asked.loss}, {args.dtype}")
    try:
        found = _found(args, asked)
    except KeyboardInterrupt:
        goes_on = f"; the same command goes on with what is in {args.out}.part" if args.out is not None else ""
        print(f"hessiankit: interrupted{goes_on}", file=sys.stderr)
        return INTERRUPTED
    except OutOfMemoryError as error:
        told = in_options(str(error), OPTIONS).rstrip(".").replace("batch_size=1", "--batch 1")
        raise OutOfMemoryError(f"{told}; --dry-run says what it takes") from error
    except InputError as error:
        raise InputError(in_options(str(error), OPTIONS)) from error
    show(found, args.table)
    if args.out is not None and not args.dry_run:
        say(f"wrote {args.out}")
    if args.plot is not None and isinstance(found, Hessian):
        _draw(args, asked, found)
    if args.json is not None:
        write_json("hessian", args.json, _numbers(args, asked, found))
    return FAILED if isinstance(found, Forecast) and not found.fits else OK


def _found(args: argparse.Namespace, asked: Asked) -> Hessian | Forecast:
    given: dict[str, Any] = {"loss": asked.loss, "params": args.params, "out": args.out, "overwrite": args.overwrite}
    if args.dry_run:
        forecast: Forecast = hessian(asked.model, asked.inputs, asked.target, dry_run=True, **given)
        return forecast
    with progress_bar() as tell:
        found: Hessian = hessian(
            asked.model, asked.inputs, asked.target, progress=lambda done, total: tell("hessian", done, total), **given
        )
    return found


def _of_block(args: argparse.Namespace) -> Asked:
    """Return the block that the options describe, on drawn inputs and targets."""
    _refuse(args, OF_A_MODEL, "is of a model; add --model")
    torch.manual_seed(args.seed)
    block = block_of(args, args.d_model, args.d_ff, affine=not args.no_affine)
    try:
        block.to(args.device, getattr(torch, args.dtype))
    except (RuntimeError, AssertionError) as error:
        told = str(error).partition("\n")[0]
        raise InputError(f"hessian: --device {args.device} cannot be used: {told}") from error
    inputs, target, loss, data = _drawn(args, block, (args.batch or 1, args.tokens or 4, args.d_model))
    size = sum(p.numel() for p in block.parameters())
    return Asked(block, inputs, target, loss, f"TransformerBlock, {args.placement}, {size:,} parameters", data)


def _of_model(args: argparse.Namespace) -> Asked:
    """Return the model that --model stands for, on windows of a text or on drawn inputs."""
    _refuse(args, OF_A_BLOCK, "describes a block; drop it, or --model")
    loaded = load_model(args.model, seed=args.seed, device=args.device, dtype=getattr(torch, args.dtype))
    if args.shape is not None:
        alone = [name for name in ("text", "batch", "tokens") if getattr(args, name) is not None]
        if alone:
            raise InputError(f"hessian: --{alone[0]} does not go with --shape, which says how large the inputs are; drop one")
        inputs, target, loss, data = _drawn(args, loaded.model, tuple(args.shape))
        return Asked(loaded.model, inputs, target, loss, str(loaded), data)
    if args.loss == "mse":
        raise InputError("hessian: --loss mse of a text; the next token is a label: take cross_entropy, or drawn inputs: --shape")
    text = load_text("stdlib" if args.text is None else args.text)
    batch, tokens = args.batch or 2, args.tokens or 16
    inputs, target = (x.to(args.device) for x in text_batch(loaded, text, batch, tokens, seed=args.seed))
    data = f"{batch} sequences of {tokens} {loaded.tokens}, {text.name}"
    return Asked(loaded.model, inputs, target, "cross_entropy", str(loaded), data)


def _drawn(args: argparse.Namespace, model: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, str, str]:
    """Return standard normal inputs, a target of the output's shape or labels, the loss, and words."""
    generator = torch.Generator().manual_seed(args.seed)
    words = f"standard normal inputs of shape {' x '.join(map(str, shape))}, seed {args.seed}"
    try:
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(args.device, getattr(torch, args.dtype))
        with torch.no_grad():
            output = model(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        told = str(error).partition("\n")[0]
        if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in told:
            smaller = "--shape" if args.model is not None else "--batch, --tokens or --d-model"
            raise OutOfMemoryError(
                f"hessian: inputs of shape {list(shape)} and what the model makes of them do not fit; pass a smaller {smaller}"
            ) from error
        raise InputError(
            f"hessian: the model does not take inputs of shape {list(shape)}: {told}; pass the shape it takes with --shape, or "
            "leave it out for tokens of a text"
        ) from error
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or output.ndim == 0:
        raise InputError(f"hessian: the model returned {type(output).__name__} of no shape; expected a tensor of outputs")
    if (args.loss or "mse") == "mse":
        target = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        return inputs, target, "mse", f"{words}; targets likewise"
    labels = torch.randint(output.shape[-1], output.shape[:-1], generator=generator)
    return inputs, labels.to(args.device), "cross_entropy", f"{words}; drawn labels"


def _refuse(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """Refuse options that were given and would not count."""
    top = Parser()
    add_hessian(top.add_subparsers())
    usual = top.parse_args(["hessian"])
    given = [name for name in names if getattr(args, name) != getattr(usual, name)]
    if given:
        raise InputError(f"hessian: --{given[0].replace('_', '-')} {why}")


def _draw(args: argparse.Namespace, asked: Asked, found: Hessian) -> None:
    from hessiankit.drawing.plots import heatmap  # Matplotlib takes a second that others need not wait for

    title = f"Hessian of {asked.name.partition(',')[0]}"
    heatmap(found.matrix, found.names, found.slices, title=title, path=args.plot)
    say(f"wrote {args.plot} and {args.plot.with_suffix('.csv')}")


def _numbers(args: argparse.Namespace, asked: Asked, found: Hessian | Forecast) -> dict[str, Any]:
    return {
        "model": asked.name,
        "data": asked.data,
        "loss": asked.loss,
        "seed": args.seed,
        "out": args.out,
        "forecast" if isinstance(found, Forecast) else "hessian": found.to_dict(),
        "environment": environment(),
    }
