"""What the parsers of all commands share: the form of help and errors, and the options that mean the same everywhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from hessiankit.commands.exit_codes import USAGE, described

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Add: TypeAlias = Callable[..., Any]
Examples: TypeAlias = Sequence[tuple[str, str]]
"""Commands as they are typed, and what each does."""

STDOUT = Path("-")
"""The file that is standard output."""


class Help(argparse.HelpFormatter):
    """Fills paragraphs, and leaves lines that are indented, which are commands, as they stand."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type in (int, positive) else super()._get_default_metavar_for_optional(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(line if line.startswith("  ") else fill(line, width, indent) for line in text.splitlines())


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all errors of the command line.

    Attributes:
        examples: Those at the end of its help.
    """

    examples: Examples = ()

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(
    commands: Commands, name: str, *, runner: str, help: str, description: str, examples: Examples, failed: str | None = None
) -> Parser:
    """Add a command and return its parser.

    Args:
        commands: What ``add_subparsers`` returned.
        name: Of the command.
        runner: ``"module:function"``, imported when the command runs.
        help: The line in the list of commands.
        description: What the command does, at the head of its help.
        examples: Stand at the end of its help.
        failed: When it ends with exit code 1; None if it never does.
    """
    parser = commands.add_parser(name, help=help, description=description, epilog=_epilog(examples, failed), formatter_class=Help)
    parser.examples = examples
    parser.set_defaults(runner=runner)
    return parser


def _epilog(examples: Examples, failed: str | None) -> str:
    lines = [line for command, what in examples for line in (f"  {command}", f"      {what}")]
    return "\n".join(["examples:", *lines, "", f"exit codes: {described(failed)}"])


def add_json(add: Add) -> None:
    """Add ``--json``, which every command has."""
    add(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="PATH",
        help="also write every number to this file; with - or without PATH to standard output, and all else to standard error",
    )


def add_table(add: Add) -> None:
    """Add ``--table``, which every command that prints a result has."""
    add("--table", action="store_true", help="print every row and column; in a terminal the result else takes a screen")


def add_model(add: Add, *, default: str | None = None) -> None:
    """Add ``--model``, which :func:`hessiankit.loading.load_model` reads."""
    tiny = "tiny (default)" if default == "tiny" else "tiny"
    add(
        "--model",
        metavar="SOURCE",
        default=default,
        help=f"{tiny}: 3 blocks, bytes; a folder of save_pretrained; a config.json; module:function",
    )


def add_block_options(add: Add) -> None:
    """Add the options of a block: placement, norm, activation, heads, biases, mask, positions, depth."""
    add("--placement", default="post", help="where the norms stand: post (default), pre, hybridnorm, deepnorm, ...")
    add("--norm", default="layernorm", help="layernorm (default) or rmsnorm")
    add("--activation", default="relu", help="relu (default), gelu, gelu_tanh, silu, tanh, leaky_relu, identity, swiglu")
    add("--heads", type=positive, default=1, help="heads of queries (default 1)")
    add("--kv-heads", type=positive, help="heads of keys and values (default: as many)")
    add("--bias", action="store_true", help="biases in the attention and the network")
    add("--causal", action="store_true", help="a token attends to itself and earlier tokens")
    add("--rotary", action="store_true", help="rotary positions")
    add("--layer", type=positive, default=1, help="number of the block in its stack, from 1 (default 1)")
    add("--layers", type=positive, help="blocks in the stack (default: as many as --layer)")


def positive(text: str) -> int:
    """Return a positive integer, or raise what argparse expects.

    >>> positive("3")
    3
    """
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
