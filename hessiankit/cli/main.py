# PYTHON_ARGCOMPLETE_OK
"""The command line, ``hessiankit`` or ``python -m hessiankit``: a command each for the toolkit's main jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from hessiankit.cli.bounds import add_bounds
from hessiankit.cli.check import add_check
from hessiankit.cli.claims import add_claims
from hessiankit.cli.compile import add_compile
from hessiankit.cli.derive import add_derive
from hessiankit.cli.hessian import add_hessian
from hessiankit.cli.monitor import add_monitor
from hessiankit.cli.parsing import CLOSED, FAILED, INTERRUPTED, OK, USAGE, Help, Parser, in_options
from hessiankit.cli.routes import add_routes
from hessiankit.cli.sharpness import add_sharpness
from hessiankit.cli.tune import add_tune
from hessiankit.support.errors import HessiankitError
from hessiankit.support.files import check_writable, output_for
from hessiankit.support.package import __version__

__all__ = ["CLOSED", "FAILED", "INTERRUPTED", "OK", "USAGE", "main", "parser"]

COMMANDS = (
    add_check,
    add_hessian,
    add_derive,
    add_bounds,
    add_sharpness,
    add_tune,
    add_monitor,
    add_routes,
    add_claims,
    add_compile,
)
EXAMPLES = """\
examples:
  hessiankit check --quick
      a model's exact Hessian beside automatic differentiation, in a few seconds
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
    for add in COMMANDS:
        add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # before torch is imported: threads wait microseconds, then sleep
    top = parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(top)
    args = top.parse_args(argv)
    try:
        for name in FILES:
            check_writable(args.command, getattr(args, name, None))
        with output_for(vars(args).values()):
            code = _runner(args.runner)(args)
            sys.stdout.flush()
        return code
    except HessiankitError as error:
        return _told(in_options(str(error), args.command, args.parser), USAGE)
    except KeyboardInterrupt:
        return _told("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at its end
        return CLOSED
    except OSError as error:
        where = f" {error.filename}" if error.filename is not None else ""
        return _told(f"{args.command}: cannot use{where or ' a file'}: {error.strerror or error}", USAGE)


def _runner(path: str) -> Callable[..., int]:
    """Import the function that carries out a command."""
    module, _, name = path.partition(":")
    run: Callable[..., int] = getattr(import_module(module), name)
    return run


def _told(message: str, code: int) -> int:
    print(f"hessiankit: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
