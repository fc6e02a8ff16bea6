"""Parsers of the commands: the form of help and errors, and the options that several commands share.

An unexpected error prints Python's traceback and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from hessiankit.support.errors import InputError, did_you_mean, not_known
from hessiankit.support.files import STDOUT, write_json
from hessiankit.support.tables import show

OK, FAILED, USAGE, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141
"""Exit codes: done; what was checked is not as it should be; an option, a file or a model cannot be used; Ctrl-C; what read the
output stopped reading, as in ``hessiankit derive --list | head``."""

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Add: TypeAlias = Callable[..., Any]

NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "leaky_relu", "identity", "swiglu")
LOSSES = ("mse", "cross_entropy")
"""Names that options take, listed here since their own modules import torch."""
SHAPE_OF_A_BLOCK = ("norm", "no_affine", "activation", "heads", "kv_heads", "bias", "causal", "rotary", "layer", "layers")
"""Options of a block besides its placement and its widths."""
SOURCES = "'tiny', a folder that save_pretrained wrote, a config.json, or 'module:function'"
"""What ``--model`` takes."""


def number(kind: type[int] | type[float], wanted: str, fits: Callable[[float], bool]) -> Callable[[str], Any]:
    """Return a function that reads a number, or raises what argparse expects.

    >>> number(int, "a digit", lambda n: 0 <= n <= 9)("7")
    7
    """

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return read


SEEDS = 2**32 - 1
"""The largest seed that Python, NumPy, scikit-learn and torch all take."""
positive = number(int, "a positive whole number", lambda n: n >= 1)
seed = number(int, f"a whole number from 0 to {SEEDS}", lambda n: 0 <= n <= SEEDS)
positive_number = number(float, "a positive number", lambda x: 0 < x < math.inf)
probability = number(float, "a number above 0 and below 1, such as 0.95", lambda x: 0 < x < 1)


def sizes(text: str) -> list[int]:
    """Return positive integers between commas.

    >>> sizes("4,16,32")
    [4, 16, 32]
    """
    return [positive(size) for size in text.split(",")]


class Help(argparse.HelpFormatter):
    """Fills paragraphs, and leaves lines that are indented, which are commands, as they stand."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type in (positive, seed) else super()._get_default_metavar_for_optional(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(line if line.startswith("  ") else fill(line, width, indent) for line in text.splitlines())


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all errors of the command line; its help ends with the ``examples``."""

    examples: Sequence[tuple[str, str]] = ()

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}{' See' if message.endswith('?') else '; see'} {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; for an unknown option, exit with an error of this command that names the nearest options."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [option for action in self._actions for option in action.option_strings]
            near = did_you_mean(rest[0].partition("=")[0], options) if rest[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return known, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r} {not_known(value, action.choices)}")


def refuse(args: argparse.Namespace, names: Collection[str], why: str) -> None:
    """Raise an error for the first given option that would have no effect; ``why`` follows its name in the message."""
    for action in args.parser._actions:
        if action.dest in names and getattr(args, action.dest) != action.default:
            raise InputError(f"{args.command}: {action.option_strings[0]} {why}")


def check_block(args: argparse.Namespace) -> None:
    """Refuse a placement that is not known, and a layer that the stack of a block does not have."""
    from hessiankit.blocks.placements import PLACEMENTS  # without torch

    if args.placement not in PLACEMENTS:
        said = not_known(args.placement, PLACEMENTS, "--list-placements")
        raise InputError(f"{args.command}: --placement {args.placement!r} {said}")
    if args.layers is not None and args.layer > args.layers:
        raise InputError(f"{args.command}: --layer {args.layer} of --layers {args.layers}; expected 1 to {args.layers}")


def check_sources(args: argparse.Namespace) -> None:
    """Raise an error for a model or a text that does not exist."""
    if args.model != "tiny" and ":" not in args.model and not Path(args.model).expanduser().exists():
        said = f"{args.model!r} is not an existing path; expected {SOURCES} (nothing is downloaded)"
        raise InputError(f"{args.command}: --model {said}")
    if args.text not in (None, "stdlib") and not Path(args.text).expanduser().exists():
        raise InputError(f"{args.command}: --text {args.text!r} is neither 'stdlib' nor an existing path (nothing is downloaded)")


def check_problem(args: argparse.Namespace) -> None:
    """Refuse options of :func:`add_problem` that do not go together, before torch is imported."""
    if args.model is None:
        refuse(args, ("text", "shape"), "is of a model; add --model")
        return check_block(args)
    refuse(args, ("placement", "d_model", "d_ff", *SHAPE_OF_A_BLOCK), "describes a block; drop it, or --model")
    check_sources(args)
    if args.shape is not None:
        refuse(args, ("text", "batch", "tokens"), "does not go with --shape, which says how large the inputs are; drop one")
    elif args.loss == "mse":
        why = "the next token is a label: take cross_entropy, or drawn inputs: --shape"
        raise InputError(f"{args.command}: --loss mse of a text; {why}")


def add_command(commands: Commands, name: str, file: ModuleType) -> None:
    """Add the command of a file, as :mod:`hessiankit.cli` describes them."""
    about, _, description = (file.__doc__ or "").strip().partition("\n\n")
    lines = [line for command, what in file.EXAMPLES for line in (f"  {command}", f"      {what}")]
    failed = f"{FAILED} {file.FAILS}; " if hasattr(file, "FAILS") else ""
    codes = f"exit codes: {OK} done; {failed}{USAGE} an option or a file cannot be used; {INTERRUPTED} interrupted"
    parser = commands.add_parser(
        name,
        help=about[:1].lower() + about[1:].rstrip("."),
        description=" ".join(description.split()),
        epilog="\n".join(["examples:", *lines, "", codes]),
        formatter_class=Help,
    )
    parser.examples = file.EXAMPLES
    parser.set_defaults(runner=file.run, parser=parser)
    file.options(parser)


def finish(args: argparse.Namespace, result: Any, numbers: Any = None) -> None:
    """Print a command's result, and write it, or other numbers, to --json."""
    show(result, args.table)
    write_json(args.command, args.json, result if numbers is None else numbers)


def add_json(add: Add) -> None:
    """Add ``--json``, which every command has."""
    text = "also write all numbers as JSON to this file; with - or no PATH to standard output, the rest to standard error"
    add("--json", type=Path, nargs="?", const=STDOUT, metavar="PATH", help=text)


def add_output(add: Add) -> None:
    """Add ``--json``, and ``--table``, which every command that prints a result has."""
    add_json(add)
    add("--table", action="store_true", help="print all rows and columns (without it, a terminal gets one screen)")


class ListEntries(argparse.Action):
    """Prints every entry of the registry that ``const`` names, as ``"module:NAME"``, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        module, name = str(self.const).split(":")
        registry = getattr(importlib.import_module(module), name)
        parser._print_message("".join(f"{entry}\n" for entry in registry.values()), sys.stdout)
        parser.exit(OK)


def add_model(add: Add, *, default: str | None = None) -> None:
    """Add ``--model``, which :func:`hessiankit.cli.loading.load_model` reads."""
    tiny = "tiny (default)" if default == "tiny" else "tiny"
    sources = f"{tiny}: 3 blocks, bytes; a folder of save_pretrained; a config.json; module:function"
    add("--model", metavar="SOURCE", default=default, help=sources)


def add_arithmetic(add: Add, *, dtype: str | None = "float64") -> None:
    """Add ``--device``, and ``--dtype`` with this default."""
    if dtype is not None:
        add("--dtype", choices=("float64", "float32"), default=dtype, help=f"arithmetic (default {dtype})")
    add("--device", default="cpu", help="where to compute, e.g. cuda (default cpu)")


def add_problem(command: Parser, title: str, **placement: Any) -> None:
    """Add the options that :func:`hessiankit.cli.module_options.asked_of` reads: of a model, and of a block in a group."""
    add, block = command.add_argument, command.add_argument_group(title).add_argument
    add_model(add)
    text = "with --model: stdlib (default), Python's standard library; or a text file or folder"
    shape = "with --model: standard normal inputs of this shape instead of text, e.g. 4,16,32; the first counts the samples"
    add("--text", metavar="PATH", help=text)
    add("--shape", type=sizes, nargs="+", metavar="N", help=shape)
    add("--tokens", type=positive, help="tokens of each sequence (default 4; of text 16)")
    add("--params", nargs="+", metavar="NAME", help="only these parameters; names, or patterns such as '*.attention.*'")
    add("--batch", type=positive, help="sequences (default 1; of text 2)")
    add("--loss", choices=LOSSES, help="default: mse; of text cross_entropy, of the next token")
    add_arithmetic(add)
    add("--seed", type=seed, default=0, help="random seed (default 0)")
    block("--d-model", type=positive, help="width of a token (default 4)")
    block("--d-ff", type=positive, help="hidden width of the feed-forward network (default 6)")
    add_block_options(block, **placement)


def add_block_options(add: Add, **placement: Any) -> None:
    """Add the options of a block; ``placement`` overrides the default and help of ``--placement``."""
    usual = {"default": "post", "help": "norm placement: post (default), pre, hybridnorm, deepnorm, ..."}
    registry = "hessiankit.blocks.placements:PLACEMENTS"
    add("--placement", metavar="NAME", **usual | placement)
    listed = "print all norm placements with their sources and exit"
    add("--list-placements", action=ListEntries, const=registry, nargs=0, help=listed)
    add("--norm", choices=NORMS, default="layernorm", metavar="NAME", help="layernorm (default) or rmsnorm")
    add("--no-affine", action="store_true", help="norms without gain and bias")
    activations = f"relu (default), {', '.join(ACTIVATIONS[1:])}"
    add("--activation", choices=ACTIVATIONS, default="relu", metavar="NAME", help=activations)
    add("--heads", type=positive, default=1, help="heads of queries (default 1)")
    add("--kv-heads", type=positive, help="heads of keys and values (default: as many)")
    add("--bias", action="store_true", help="biases in the attention and the network")
    add("--causal", action="store_true", help="a token attends to itself and earlier tokens")
    add("--rotary", action="store_true", help="rotary positions")
    add("--layer", type=positive, default=1, help="number of the block in its stack, from 1 (default 1)")
    add("--layers", type=positive, help="blocks in the stack (default: as many as --layer)")
