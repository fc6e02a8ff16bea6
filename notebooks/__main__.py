"""``python -m notebooks``: run every notebook anew, and see that it still has the cells of its script."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import nbformat

from notebooks._execution import NotebookError, execute
from notebooks._paired import drift, notebook_of, scripts

BAD, SKIPPED = "FAILED: ", "skipped: "


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 all is well; 1 a notebook failed or is not that of its script."""
    found = {path.stem: path for path in scripts()}
    parser = argparse.ArgumentParser(
        prog="python -m notebooks",
        description="Run the cells of each script in a fresh kernel, with warnings as errors, and see that the notebook beside "
        "it has the same cells. Outputs are compared with nothing: the scripts assert what has to hold.",
        epilog="Exit status: 0 all is well; 1 a notebook failed, or its cells are not those of its script; 2 an unknown name.",
    )
    parser.add_argument("name", nargs="*", help="notebooks; by default all: " + ", ".join(found))
    parser.add_argument("--write", action="store_true", help="write each notebook, with its outputs, beside its script")
    parser.add_argument("--compare", action="store_true", help="compare the cells and run nothing")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.name if name not in found]
    if unknown:
        parser.error(f"no notebook is called {', '.join(unknown)}; there are: {', '.join(found)}")
    good = True
    for name in options.name or found:
        start = time.perf_counter()
        verdict = treat(found[name], write=options.write, compare=options.compare)
        good = good and not verdict.startswith(BAD)
        print(f"{name:28} {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
    return 0 if good else 1


def treat(script: Path, *, write: bool, compare: bool) -> str:
    """Compare, run and write the notebook of a script as asked, and return what came of it in a line."""
    difference = None if write else drift(script)
    if difference is not None:
        return f"{BAD}{difference}; python -m notebooks {script.stem} --write"
    if compare:
        return "has the cells of its script"
    if "from transformers import" in script.read_text(encoding="utf-8") and not importlib.util.find_spec("transformers"):
        return f"{SKIPPED}transformers is not installed (pip install 'hessiankit[models]')"
    try:
        executed = execute(notebook_of(script))
    except NotebookError as error:
        return f"{BAD}{error}"
    if write:
        nbformat.write(executed, script.with_suffix(".ipynb"))
    return "written" if write else "runs, and has the cells of its script"


if __name__ == "__main__":
    sys.exit(main())
