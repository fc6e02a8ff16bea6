"""Draw figures: ``python -m figures NAME ...``, ``--all``, or ``--list`` to see what there is."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from figures import names, script, summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m figures", description="Draw the papers' figures anew.")
    parser.add_argument("name", nargs="*", help="figures to draw")
    parser.add_argument("--list", action="store_true", help="name the figures and say what they show")
    parser.add_argument("--all", action="store_true", help="draw every figure")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps: seconds instead of minutes")
    parser.add_argument("--out", type=Path, default=Path("build/figures"), help="folder to write to (default: %(default)s)")
    parser.add_argument(
        "--format", choices=("png", "svg", "pdf"), default="png", help="format of the pictures (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    known = names()
    if options.list:
        width = max(map(len, known))
        for name in known:
            print(f"{name:{width}}  {summary(name)}")
        return 0
    chosen = known if options.all else options.name
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        asked = f"no figure is called {', '.join(unknown)}" if unknown else "name a figure, or pass --all"
        parser.error(f"{asked}; there are: {', '.join(known)}")
    for name in chosen:
        start = time.perf_counter()
        print(f"{name}: {summary(name)}")
        for path in script(name)(options.out, quick=options.quick, suffix=f".{options.format}"):
            print(f"  {path}")
        print(f"  {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
