"""A notebook as a page of the site: its cells with the outputs that are kept in its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHOWN = ("image/png", "text/html", "text/latex", "text/plain")
"""Kinds of output, the first that there is."""


def notebook_page(path: Path) -> str:
    """Return a notebook's cells and outputs as Markdown."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = _text(cell["source"])
    if cell["cell_type"] != "code":
        return [source]
    return [_fence("python", source), *(_output(output) for output in cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    """Return an output; an error's output does not occur, because a notebook with one is not kept.

    >>> print(_output({"output_type": "stream", "name": "stdout", "text": ["42\\n"]}))
    ````{ .text .output }
    42
    ````
    >>> _output({"output_type": "display_data", "data": {"image/png": "iVBO", "text/plain": "<Figure>"}})
    '![](data:image/png;base64,iVBO)'
    """
    if output["output_type"] == "stream":
        return _fence("{ .text .output }", _text(output["text"]))
    kind = next(kind for kind in SHOWN if kind in output["data"])
    shown = _text(output["data"][kind])
    if kind == "image/png":
        return f"![](data:image/png;base64,{shown.replace(chr(10), '')})"
    if kind == "text/html":
        return f'<div class="output">\n{shown}\n</div>'
    return shown if kind == "text/latex" else _fence("{ .text .output }", shown)


def _fence(language: str, text: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)
