"""Draw figures: ``python -m figures NAME ...``, or ``--all``; ``--list`` names them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from figures import accepted, names, script, summary
from hessiankit.cli.parsing import FAILED, INTERRUPTED, Parser, add_json
from hessiankit.cli.parsing import OK as DRAWN
from hessiankit.support.errors import HessiankitError, InputError, not_known
from hessiankit.support.files import check_writable, output_for, write_json

SOURCES = {"images": ("digits",), "text": ("stdlib",)}
"""Names of sources that are no path, by option."""
EMPTY: Mapping[str, str] = {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = Parser(
        prog="python -m figures",
        description="Draw the papers' figures anew, each with its numbers as CSV or JSON beside it.",
        epilog="Training runs are kept below OUT/cache. After Ctrl-C or a failure the same command goes on with what is left. "
        "Exit status: 0 all are drawn; 1 some failed, and are named at the end, the others are drawn; 2 a name, an option or the "
        "folder cannot be used; 130 interrupted.",
    )
    add = parser.add_argument
    add("name", nargs="*", help="figures to draw")
    add("--list", action="store_true", help="name the figures and say what they show")
    add("--all", action="store_true", help="draw every figure")
    add("--quick", action="store_true", help="a smaller model and fewer steps: seconds instead of minutes")
    add("--out", type=Path, default=Path("build/figures"), help="folder to write to (default: %(default)s)")
    add("--format", choices=("png", "svg", "pdf"), default="png", help="format of the pictures (default: %(default)s)")
    add(
        "--images",
        metavar="PATH",
        help="a .npz file with images and labels, for the figures of images (default: scikit-learn's digits)",
    )
    add("--text", metavar="PATH", help="a file or a folder, for the figures of text (default: Python's standard library)")
    add_json(add)
    options = parser.parse_args(arguments)
    try:
        check_writable("figures", options.json)
        with output_for([options.json]):
            return run(options)
    except InputError as error:
        parser.error(str(error).removeprefix("figures: "))
    except KeyboardInterrupt:  # before the first figure, or between two of them
        print("figures: interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED


def run(options: argparse.Namespace) -> int:
    """Do what the options ask for and return the exit status.

    Raises:
        InputError: If a name, an option or the folder cannot be used.
    """
    known = names()
    if options.list:
        width = max(map(len, known))
        for name in known:
            print(f"{name:{width}}  {summary(name)}")
        write_json("figures", options.json, {name: summary(name) for name in known})
        return DRAWN
    chosen = known if options.all else list(dict.fromkeys(options.name))
    for name in chosen:
        if name not in known:
            raise InputError(f"figures: {name!r} {not_known(name, known, '--list')}")
    if not chosen:
        raise InputError(f"figures: name a figure, or pass --all; there are: {', '.join(known)}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        raise InputError(
            f"figures: cannot write to {options.out}: {error.strerror}; pass a folder that can be written to with --out"
        ) from error
    sources = {name: path for name in ("images", "text") if (path := getattr(options, name)) is not None}
    check_sources(chosen, sources)
    return draw_all(chosen, options.out, quick=options.quick, suffix=f".{options.format}", sources=sources, json=options.json)


def check_sources(chosen: Sequence[str], sources: Mapping[str, str]) -> None:
    """Refuse paths that are not there, and options that no chosen figure takes.

    Raises:
        InputError: If there is one.
    """
    for option, path in sources.items():
        if path not in SOURCES[option] and not Path(path).expanduser().exists():
            raise InputError(f"figures: --{option} {path}: there is no such file or folder; nothing is downloaded")
        if not any(option in accepted(name) for name in chosen):
            taking = ", ".join(name for name in names() if option in accepted(name))
            raise InputError(f"figures: {', '.join(chosen)} has no --{option}; it is of: {taking}")


def draw_all(
    chosen: Sequence[str], out: Path, *, quick: bool, suffix: str, sources: Mapping[str, str] = EMPTY, json: Path | None = None
) -> int:
    """Draw figures one after the other, whatever becomes of the others, and return the exit status.

    Args:
        chosen: Names.
        out: Folder that exists.
        quick: Smaller models and fewer steps.
        suffix: Of the pictures.
        sources: ``images`` and ``text``, where they are not the default, for the figures that take them.
        json: File for the names of the files, and of what failed; None for none.
    """
    from figures._session import DrawingSession  # loads torch, which --list need not wait for

    session = DrawingSession.of(out, chosen, quick, suffix, sources)
    failed: dict[str, str] = {}
    began = time.perf_counter()
    for name in chosen:
        if name in session.drawn:
            print(f"{name}: drawn before the interruption\n  " + "\n  ".join(session.drawn[name]), flush=True)
            continue
        start = time.perf_counter()
        print(f"{name}: {summary(name)}", flush=True)
        try:
            own = {option: path for option, path in sources.items() if option in accepted(name)}
            files = script(name)(out, quick=quick, suffix=suffix, **own)
            session.add(name, files)
        except KeyboardInterrupt:
            left = [one for one in chosen if one not in session.drawn and one not in failed]
            print(f"figures: interrupted; the same command goes on with {', '.join([*left, *failed])}", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            failed[name] = _told(error)
            print(f"  failed: {failed[name]}", file=sys.stderr, flush=True)
            continue
        for path in files:
            print(f"  {path}")
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
    print(f"drawn: {len(chosen) - len(failed)} of {len(chosen)}, in {time.perf_counter() - began:.1f} s, in {out}")
    for name, why in failed.items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    write_json("figures", json, {"drawn": session.drawn, "failed": failed, "seconds": time.perf_counter() - began})
    if failed:
        return FAILED
    session.close()
    return DRAWN


def _told(error: Exception) -> str:
    """Return an error as one line; where it is none that the toolkit foresaw, print first where it came from."""
    if isinstance(error, HessiankitError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
