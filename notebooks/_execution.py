"""A notebook in a kernel of its own: warnings are errors, and what it shows names neither folders nor machines."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from PIL import Image

ROOT = str(Path(__file__).parents[1])
MAX_BYTES = 300_000
INLINE = "module://matplotlib_inline.backend_inline"
START = """
import sys
import warnings
assert sys.prefix == {prefix!r}, f"the kernel 'python3' is that of {{sys.prefix}}; expected {prefix}"
sys.path.insert(1, {root!r})
warnings.simplefilter("error")
for category in (DeprecationWarning, PendingDeprecationWarning):
    warnings.simplefilter("ignore", category)
"""


class NotebookError(Exception):
    """A cell failed, or its output should not be kept."""


def execute(notebook: NotebookNode, *, timeout: int = 300) -> NotebookNode:
    """Run the cells of a notebook in a fresh kernel, in an empty folder, and return it with their outputs.

    Args:
        notebook: Without outputs; it is changed.
        timeout: Seconds that a cell may take.

    Raises:
        NotebookError: A cell failed; its error is the last line. Or the outputs are too large, or show a path.
    """
    start = START.format(prefix=sys.prefix, root=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}},
            record_timing=False, coalesce_streams=True, extra_arguments=["--IPKernelApp.log_level=ERROR"],
        )  # fmt: skip
        try:
            notebook.cells.insert(0, new_code_cell(start))
            client.execute(env={**os.environ, "MPLBACKEND": INLINE})
            del notebook.cells[0]
        except CellExecutionError as error:
            raise NotebookError(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()) from None
        _number(notebook)
        _shrink(notebook)
        leaked = _leaked(notebook, (folder, os.path.realpath(folder)))
    if leaked:
        raise NotebookError(f"an output shows {leaked!r}; print names of files, not where they lie")
    size = len(json.dumps(notebook))
    if size > MAX_BYTES:
        raise NotebookError(f"the outputs take {size:,} bytes, more than {MAX_BYTES:,}; draw fewer or smaller pictures")
    return notebook


def _number(notebook: NotebookNode) -> None:
    """Count the code cells from 1: the kernel has counted its preparation too."""
    for k, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.execution_count = k
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = k


def _shrink(notebook: NotebookNode) -> None:
    """Keep pictures with a palette of 256 colours, a third of the bytes, that cover the rare peaks of a heat map."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                out = io.BytesIO()
                with Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))) as picture:
                    few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                    few.save(out, "PNG", optimize=True)
                output.data["image/png"] = base64.b64encode(out.getvalue()).decode()


def _leaked(notebook: NotebookNode, folders: tuple[str, ...]) -> str | None:
    """Return a path or a machine's name that stands in an output."""
    private = {*folders, ROOT, str(Path.home()), sys.prefix, tempfile.gettempdir(), platform.node()}
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    return next((name for name in sorted(private) if len(name) > 3 and name in shown), None)
