"""The ledger on the site: a page for each paper, a card for each row, coloured and filtered by verdict.

docs/claims.md is one table, as GitHub shows it; the site splits it while it is built, and links to its rows lead to the cards.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections import Counter
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

PAGE = "claims.md"
SECTION = re.compile(r'^<a id="(?P<paper>[\w-]+)"></a>\n\n## (?P<title>.*)\n', re.M)
ROW = re.compile(r'^\| <a id="(?P<anchor>[^"]+)"></a>`(?P<name>[^`]+)` \| (?P<cells>.*) \|$', re.M)
VERDICT = re.compile(r"^- \*\*([A-Z, ]+)((?: \([^*]*\))?)\*\*", re.M)
LINK = re.compile(r"(\]\()(?P<path>(?:\.\./)*)claims\.md#(?P<paper>[a-z]+(?:-[a-z]+)*?)(?P<row>-[\w.-]+)?\)")


def slug(verdict: str) -> str:
    """Return a verdict as the name of a class, without its severity.

    >>> slug("WRONG AS PRINTED (constant)"), slug("SAME DIRECTION, SMALLER")
    ('wrong-as-printed', 'same-direction-smaller')
    """
    return verdict.partition(" (")[0].lower().replace(",", "").replace(" ", "-")


def card(paper: str, anchor: str, name: str, cells: str) -> str:
    """Return a row of the table as a card: id, verdict, place, statement, correction, evidence."""
    place, statement, verdict, correct, evidence = (re.split(r"(?<!\\) \| ", cells) + [""] * 5)[:5]
    lines = [
        f'<div class="claim {slug(verdict)}" id="{anchor}" data-verdict="{slug(verdict)}" markdown>',
        f'[`{paper}/{name}`](#{anchor}) <span class="verdict">{html.escape(verdict)}</span> {place}',
        "",
        statement,
    ]
    lines += ["", f"**Correct:** {correct}"] if correct.strip() else []
    lines += ["", f"<small>{evidence}</small>"] if evidence.strip() else []
    return "\n".join([*lines, "</div>"]).replace(r"\<", "&lt;").replace(r"\>", "&gt;")


def pages(text: str) -> dict[str, str]:
    """Return the overview under ``claims.md`` and each paper's page under ``claims/<paper>.md``."""
    starts = list(SECTION.finditer(text))
    papers = [match["paper"] for match in starts]
    overview = text[: starts[0].start()]
    for paper in papers:
        overview = overview.replace(f"(#{paper})", f"(claims/{paper}.md)")
    found = {PAGE: overview}
    for match, end in zip(starts, [*(m.start() for m in starts[1:]), len(text)], strict=True):
        paper, body = match["paper"], text[match.end() : end]
        rows = list(ROW.finditer(body))
        verdicts = Counter(re.split(r"(?<!\\) \| ", row["cells"])[2].partition(" (")[0] for row in rows)
        buttons = "".join(
            f'<button type="button" class="{name}" data-verdict="{name}">{html.escape(verdict)} {count}</button>'
            for verdict, count in verdicts.most_common()
            for name in [slug(verdict)]
        )
        intro = body[: body.find("\n| ")].strip()
        lines = [f"# {match['title']}: all statements", "", intro, "", f'<div class="claim-filter">{buttons}</div>', ""]
        lines += [card(paper, row["anchor"], row["name"], row["cells"]) + "\n" for row in rows]
        found[f"claims/{paper}.md"] = "\n".join(lines)
    return found


def _to_card(match: re.Match[str], where: str, papers: set[str]) -> str:
    """Return a link to a row, or to a paper's rows, as one to its page."""
    whole = match["paper"] + (match["row"] or "")
    paper = next((p for p in sorted(papers, key=len, reverse=True) if whole == p or whole.startswith(f"{p}-")), None)
    if paper is None:
        return match[0]
    anchor = "" if whole == paper else f"#{whole}"
    return f"{match[1]}{posixpath.relpath(f'claims/{paper}.md', posixpath.dirname(where) or '.')}{anchor})"


def on_files(files: Files, config: Any) -> Files:
    """Put the overview and the papers' pages in the table's place."""
    table = files.get_file_from_path(PAGE)
    assert table is not None
    made = pages(table.content_string)
    config.extra["claim_papers"] = {name.split("/")[1].removesuffix(".md") for name in made if "/" in name}
    files.remove(table)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lead links to rows to their cards; colour the verdicts."""
    where = page.file.src_uri
    if where.startswith("papers/"):
        markdown = VERDICT.sub(lambda match: f'- <span class="verdict {slug(match[1])}">{match[1]}{match[2]}</span>', markdown)
    return LINK.sub(lambda match: _to_card(match, where, config.extra["claim_papers"]), markdown)
