# PYTHON_ARGCOMPLETE_OK
"""The command line, ``hessiankit`` or ``python -m hessiankit``: a command each for the toolkit's main jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from hessiankit.cli.parsing import CLOSED, FAILED, INTERRUPTED, OK, USAGE, Help, Parser, add_command
from hessiankit.support.errors import HessiankitError, InputError, named
from hessiankit.support.files import check_writable, output_for
from hessiankit.support.package import __version__

__all__ = ["CLOSED", "FAILED", "INTERRUPTED", "OK", "USAGE", "answer", "main", "parser"]

COMMANDS = ("study", "check", "hessian", "derive", "bounds", "sharpness", "monitor", "compile")
EXAMPLES = """\
examples:
  hessiankit study --quick
      a classifier's exact Hessian beside automatic differentiation, in a few seconds
  hessiankit hessian --placement pre --heads 2 --plot hessian.png
      the exact Hessian of a transformer block
  hessiankit COMMAND --help
      the options of a command, and more examples

exit codes: 0 done, and nothing is wrong; 1 what was checked is not as it should be; 2 an option or a file cannot be used; 130 \
interrupted"""
FILES = ("json", "markdown", "html", "plot")


def parser() -> Parser:
    """Return the parser of the whole command line."""
    about = "Closed-form curvature of transformers, checked."
    top = Parser(prog="hessiankit", description=about, epilog=EXAMPLES, formatter_class=Help)
    top.add_argument("--version", action="version", version=f"hessiankit {__version__}")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        add_command(commands, name.replace("_", "-"), import_module(f"hessiankit.cli.{name}"))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # before torch is imported: threads wait microseconds, then sleep
    top = parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(top)
    return answer(top, argv)


def answer(top: Parser, argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments of a parser name, and return the exit code; an error is one line."""
    try:
        args = top.parse_args(argv)
    except InputError as error:
        return _fail(top.prog, str(error), USAGE)
    try:
        for name in FILES:
            check_writable(args.command, getattr(args, name, None))
        with output_for(vars(args).values()):
            code: int | None = args.runner(args)
            sys.stdout.flush()
        return code or OK
    except HessiankitError as error:
        return _fail(top.prog, named(args.command, str(error)), USAGE)
    except KeyboardInterrupt:
        return _fail(top.prog, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at its end
        return CLOSED
    except OSError as error:
        where = f" {error.filename}" if error.filename is not None else ""
        return _fail(top.prog, f"{args.command}: cannot use{where or ' a file'}: {error.strerror or error}", USAGE)


def _fail(program: str, message: str, code: int) -> int:
    print(f"{program.rpartition(' ')[2]}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
