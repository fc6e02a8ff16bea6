"""Links that leave docs/ lead to files of the repository on GitHub; on the site each such file is a page with its text."""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))

from notebook_pages import notebook_page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".txt": "text"}


def page_of(target: str) -> str:
    """Return where the page of a file of the repository lies on the site.

    >>> page_of("derivations/bounds")
    'source/derivations/bounds.md'
    """
    return f"source/{target.removesuffix('.md')}.md"


def outside(markdown: str, folder: str) -> set[str]:
    """Return the files of the repository, outside of docs/, that a text in ``folder`` links to."""
    found: set[str] = set()
    _each_link(markdown, folder, lambda target: found.add(target) if _is_outside(target) else None)
    return found


def rewritten(markdown: str, folder: str, page: str) -> str:
    """Return a text of the repository's ``folder`` with its links as they have to be on the site's ``page``."""

    def place(target: str) -> str | None:
        where = page_of(target) if _is_outside(target) else posixpath.relpath(target, "docs")
        return posixpath.relpath(where, posixpath.dirname(page))

    return _each_link(markdown, folder, place)


def _is_outside(target: str) -> bool:
    return not target.startswith("docs/")


def _each_link(markdown: str, folder: str, change: Any) -> str:
    def one(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"[a-z]+:", target):
            return match[0]
        inside = posixpath.normpath(posixpath.join(folder, target))
        new = change(inside) if (ROOT / inside).exists() else None
        return match[0] if new is None else match[1] + new + match[3]

    parts = FENCE.split(markdown)
    return "".join(part if k % 2 else LINK.sub(one, part) for k, part in enumerate(parts))


def text_of(target: str) -> str:
    """Return the page of a file: a Markdown page as it is; a notebook with its outputs; code in a fence; a folder as a list."""
    path = ROOT / target
    if path.is_dir():
        rows = [f"| `{file.name}` | {_summary(file)} |" for file in sorted(path.glob("*.py"))]
        return "\n".join([f"# {target}/", "", "| file | |", "|---|---|", *rows])
    if path.suffix == ".ipynb":
        return rewritten(notebook_page(path), posixpath.dirname(target), page_of(target))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return rewritten(text, posixpath.dirname(target), page_of(target))
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def _summary(file: Path) -> str:
    first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return first.replace("|", "\\|")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside of docs/ that a page links to, and for those that these link to."""
    todo: set[str] = set()
    for file in files.documentation_pages():
        todo |= outside(file.content_string, posixpath.dirname(f"docs/{file.src_uri}"))
    done: set[str] = set()
    while todo:
        target = todo.pop()
        done.add(target)
        page = File.generated(config, page_of(target), content=text_of(target), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
        if target.endswith(".md"):
            todo |= outside((ROOT / target).read_text(encoding="utf-8"), posixpath.dirname(target)) - done
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page to the site's pages."""
    where = page.file.src_uri
    if where.startswith("source/"):
        return markdown
    return rewritten(markdown, posixpath.dirname(f"docs/{where}"), where)
