"""Errors of the library in the words of the command line: an option stands where the library names an argument."""

from __future__ import annotations

import argparse
import re

ARGUMENTS = {
    "n_heads": "heads",
    "n_kv_heads": "kv_heads",
    "n_layers": "layers",
    "batch_size": "batch",
    "length": "tokens",
}
"""Arguments of the library -> the options that have another name."""
READ = {"load_model": "model", "load_text": "text", "load_images": "data", "patch_for": "seq_len"}
"""Functions that read one option, whose value their messages show without its name."""


def in_options(message: str, command: str, parser: argparse.ArgumentParser) -> str:
    """Return an error's message with the command's name at its head, and ``--name`` for ``name=...`` of Python.

    A value of which nothing but its place is meant, ``...``, ``[...]`` or ``True``, goes; another one stays. ``name=None``, which
    cannot be typed, stays as it is.

    Args:
        message: What the library says, the name of a function or class at its head.
        command: The command.
        parser: Of the command, whose options are meant.

    >>> parser = argparse.ArgumentParser()
    >>> for option in ("--out", "--overwrite", "--heads", "--text"):
    ...     _ = parser.add_argument(option)
    >>> in_options("hessian: Pass another out=..., or overwrite=True", "check", parser)
    'check: Pass another --out, or --overwrite'
    >>> in_options("Attention: n_heads=3 does not divide out=None", "hessian", parser)
    'hessian: --heads 3 does not divide out=None'
    >>> in_options("load_text: 'x' is no path", "hessian", parser)
    "hessian: --text: 'x' is no path"
    """
    options = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    names = options | {name: options[dest] for name, dest in ARGUMENTS.items() if name not in options and dest in options}
    who, said = re.fullmatch(r"(?:([A-Za-z][\w.-]*): )?(.*)", message, re.DOTALL).groups()  # type: ignore[union-attr]
    read = f"{options[READ[who]]}: " if READ.get(who) in options else ""
    argument = re.compile(rf"\b({'|'.join(map(re.escape, names))})=(?!None\b)(\[\.\.\.\]|\.\.\.|True\b)?")
    said = argument.sub(lambda found: names[found[1]] + ("" if found[2] else " "), said)
    return f"{command}: {read}{said.replace('hessiankit.blocks.PLACEMENTS', '--list-placements')}"
