"""What the search finds first: the main functions' page before others that mention them; source files not at all."""

from __future__ import annotations

from typing import Any

BOOST = {"reference/hessians.md": 8, "papers/curvature-gap.md": 4, "reference/checks.md": 4, "quickstart.md": 2}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Set a page's weight."""
    where = page.file.src_uri
    if where.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    elif where in BOOST:
        page.meta["search"] = {"boost": BOOST[where]}
