"""Command lines on cyclopts: programs and their commands, examples in the help, errors as one line, exit codes.

An unexpected error prints Python's traceback and ends with exit code 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from cyclopts import App, CycloptsError, Parameter

from hessiankit.support.errors import HessiankitError, named
from hessiankit.support.files import STDOUT, output_for
from hessiankit.support.package import __version__

OK, FAILED, USAGE, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141
"""Exit codes: done; what was checked is not as it should be; an option, a file or a model cannot be used; Ctrl-C; what read the
output stopped reading, as in ``hessiankit derive --list | head``."""

PARAMETER = Parameter(negative=(), allow_repeating=True)
"""No --no-flag for each --flag; of an option that is repeated, the last one counts."""
Examples: TypeAlias = Sequence[tuple[str, str]]
"""Commands as they are typed, each with what it does."""


def program(name: str, about: str, commands: Mapping[str, App], examples: Examples, fails: str = "") -> App:
    """Return a program of several commands."""
    top = command(name, examples, fails, help=about)
    for word, app in commands.items():
        top.command(app, name=word)
    return top


def command(name: str, examples: Examples, fails: str = "", **options: Any) -> App:
    """Return a command whose help ends with examples and exit codes; ``fails`` says when the exit code is 1, if that happens.

    Its function, under ``@app.default``, returns an exit code, or None for 0; the function's docstring is the help.
    """
    lines = [f"- {typed}\\\n  {what}" for typed, what in examples]
    failed = f"{FAILED} {fails}; " if fails else ""
    codes = f"Exit codes: {OK} done; {failed}{USAGE} an option or a file cannot be used; {INTERRUPTED} interrupted"
    text = "\n".join(["Examples:", "", *lines, "", codes])
    version = f"hessiankit {__version__}"
    return App(name, help_epilogue=text, help_format="markdown", version=version, default_parameter=PARAMETER, **options)


def answer(app: App, argv: Sequence[str] | None = None) -> int:
    """Run the command that arguments name, and return the exit code; an error is one line."""
    words = with_dashes(sys.argv[1:] if argv is None else argv)
    chain, _, _ = app.parse_commands(words)
    program_name = app.name[0].rpartition(" ")[2]
    name = chain[-1] if chain else program_name
    try:
        function, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        with output_for(STDOUT for word in words if word.endswith("=-")):
            code = function(*bound.args, **bound.kwargs)
            sys.stdout.flush()
        return code or OK
    except CycloptsError as error:
        cause = error.__cause__
        message, code = str(cause) if isinstance(cause, HessiankitError) else f"{error} See --help.", USAGE
    except HessiankitError as error:
        message, code = str(error), USAGE
    except KeyboardInterrupt:
        message, name, code = "interrupted", program_name, INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at its end
        return CLOSED
    except OSError as error:
        place = f" {error.filename}" if error.filename is not None else " a file"
        message, code = f"cannot use{place}: {error.strerror or error}", USAGE
    prefix = "" if name == program_name else f"{program_name}: "
    print(prefix + " ".join(named(name, message).split()), file=sys.stderr)
    return code


def with_dashes(words: Sequence[str]) -> list[str]:
    """Return the words with each ``-`` joined to its option, as ``--out=-``, which cyclopts takes for an option otherwise.

    ``--json`` without a path is ``--json=-``.
    """
    pieces: list[str] = []
    for word, successor in zip(words, [*words, "--"][1:], strict=True):
        if word.startswith("--") and (successor == "-" if word != "--json" else successor.startswith("-")):
            pieces.append(f"{word}=-")
        elif word != "-" or not pieces or not pieces[-1].endswith("=-"):
            pieces.append(word)
    return pieces
