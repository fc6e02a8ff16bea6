"""The command line, ``hessiankit`` or ``python -m hessiankit``: a command each for the toolkit's main jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from hessiankit.cli.program import answer, program

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = ("study", "check", "hessian", "derive", "bounds", "sharpness", "monitor", "compile")
EXAMPLES = (
    ("hessiankit study --quick", "a classifier's exact Hessian beside automatic differentiation, in a few seconds"),
    ("hessiankit hessian --placement pre --heads 2 --plot hessian.png", "the exact Hessian of a transformer block"),
    ("hessiankit COMMAND --help", "the options of a command, and more examples"),
)


app = program(
    "hessiankit",
    "Closed-form curvature of transformers, checked.",
    {name: import_module(f"hessiankit.cli.{name}").app for name in COMMANDS},
    EXAMPLES,
    "what was checked is not as it should be",
)
app.register_install_completion_command(help="Install completion of commands, options and values for your shell, and exit.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # before torch is imported: threads wait microseconds, then sleep
    return answer(app, argv)


if __name__ == "__main__":
    sys.exit(main())
