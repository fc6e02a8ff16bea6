"""Draw figures: ``python -m figures NAME ...``, or ``--all``; ``--list`` names them."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from figures import accepted, names, script, summary
from hessiankit.cli.options import Flag, Json
from hessiankit.cli.program import FAILED, INTERRUPTED, answer, command
from hessiankit.cli.program import OK as DRAWN
from hessiankit.support.errors import HessiankitError, InputError, not_known
from hessiankit.support.files import write_json

SOURCES: dict[str, tuple[str, ...]] = {"images": ("digits",), "text": ("stdlib",), "run": ()}
"""Names of sources that are no path, by option."""
EMPTY: Mapping[str, str] = {}
EXAMPLES = (
    ("python -m figures --list", "names of the figures, with what they show"),
    ("python -m figures curvature_gap_5 --quick", "one figure, in seconds"),
)
app = command("python -m figures", EXAMPLES, "some figures failed, and are named at the end; the others are drawn")


@app.default
def run(
    *name: str,
    list: Flag = False,
    all: Flag = False,
    quick: Flag = False,
    out: Path = Path("build/figures"),
    format: Literal["png", "svg", "pdf"] = "png",
    images: str | None = None,
    text: str | None = None,
    run: str | None = None,
    output: Json = Json(),
) -> int:
    """Draw the papers' figures anew, each with its numbers as CSV or JSON beside it.

    Training runs are kept below OUT/cache. After Ctrl-C or a failure the same command goes on with what is left.

    Args:
        name: Figures to draw.
        list: Name the figures and say what they show.
        all: Draw every figure.
        quick: A smaller model and fewer steps: seconds instead of minutes.
        out: Folder to write to.
        format: Format of the pictures.
        images: A .npz file with images and labels, for the figures of images (default: scikit-learn's digits).
        text: A file or a folder, for the figures of text (default: Python's standard library).
        run: A folder that python -m papers train wrote, drawn in place of small runs.
    """
    known = names()
    if list:
        width = max(map(len, known))
        for one in known:
            print(f"{one:{width}}  {summary(one)}")
        write_json("figures", output.json, {one: summary(one) for one in known})
        return DRAWN
    chosen = known if all else [*dict.fromkeys(name)]
    for one in chosen:
        if one not in known:
            raise InputError(f"figures: {one!r} {not_known(one, known, '--list')}")
    if not chosen:
        raise InputError(f"figures: name a figure, or pass --all; there are: {', '.join(known)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(
            f"figures: cannot write to {out}: {error.strerror}; pass a folder that can be written to with --out"
        ) from error
    sources = {option: path for option, path in (("images", images), ("text", text), ("run", run)) if path is not None}
    check_sources(chosen, sources)
    return draw_all(chosen, out, quick=quick, suffix=f".{format}", sources=sources, json=output.json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return answer(app, arguments)


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
            own: dict[str, Any] = {option: path for option, path in sources.items() if option in accepted(name)}
            own |= {"run": Path(own["run"])} if "run" in own else {}
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
