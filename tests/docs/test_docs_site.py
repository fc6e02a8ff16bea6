"""The documentation site is built without a warning, shows every public name and every formula, and asks nobody for anything."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
PACKAGES = (
    "hessiankit", "hessiankit.blocks", "hessiankit.training.depth", "hessiankit.training.distributed", "hessiankit.training.sharpness", "hessiankit.landscape", "papers",
    "hessiankit.training.monitoring", "hessiankit.training.optim", "hessiankit.training.partition", "hessiankit.verify", "derivations.bounds", "derivations.matrix",
)  # fmt: skip
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Page(HTMLParser):
    """What a page fetches, how many formulas it has, its anchors, and its text outside of code and formulas."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.formulas = 0
        self.text = ""
        self._silent = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        self.formulas += tag == "math"
        self._silent += tag in ("code", "script", "style", "math")
        if tag in FETCHED and values.get("rel") != "canonical":
            self.fetched.append(values.get(FETCHED[tag]) or "")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("code", "script", "style", "math")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._silent else data


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    for module in ("mkdocs", "material", "mkdocstrings", "math_core"):
        pytest.importorskip(module, reason="the site needs the extra 'docs'")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}


def test_nothing_is_fetched_from_elsewhere(pages: dict[str, Page]) -> None:
    fetched = {url for page in pages.values() for url in page.fetched}
    assert any("bundle" in url for url in fetched)
    assert not [url for url in fetched if re.match(r"([a-z]+:)?//", url)]


def test_every_public_name_is_shown(pages: dict[str, Page]) -> None:
    anchors = set().union(*(page.anchors for page in pages.values()))
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            home = getattr(getattr(module, name), "__module__", package)
            paths = {f"{place}.{name}" for place in (package, home, home.rpartition(".")[0], "hessiankit")}
            assert paths & anchors, f"docs/reference shows none of {sorted(paths)}"


def test_the_ledger_is_cards_by_paper(pages: dict[str, Page]) -> None:
    from papers import PAPERS, claims

    for paper in PAPERS:
        page = pages[f"claims/{paper}.html"]
        assert {row.anchor for row in claims(paper=paper)} <= page.anchors
        assert not re.search(r"\| ---|\\<", page.text)
    assert any("claims.js" in url for url in pages["claims/hybridnorm.html"].fetched)


def test_chapters_are_typeset(pages: dict[str, Page]) -> None:
    assert pages["reference/chapters.html"].formulas >= 15


def test_every_how_to_concept_and_reference_page_is_in_the_navigation() -> None:
    from mkdocs.utils.yaml import yaml_load

    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml_load(text)["nav"])))
    folders = ("howto", "concepts", "reference", "papers")
    pages = {path.relative_to(ROOT / "docs").as_posix() for name in folders for path in (ROOT / "docs" / name).glob("*.md")}
    assert not pages - listed


def test_formulas_are_mathml(pages: dict[str, Page]) -> None:
    assert sum(page.formulas for page in pages.values()) > 2000


def test_no_page_shows_markup(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        if not name.startswith("source/"):
            assert not re.search(r"\$[^$]+\$|:(func|class|meth):|>>> |::: ", page.text), name


def test_the_page_of_experiments_is_that_of_the_catalogue() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "_site" / "experiments_page.py"))["page"]()
    assert made == (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8"), "run: python docs/_site/experiments_page.py"


def test_gallery_is_made_of_the_pictures_that_there_are() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "_site" / "gallery.py"))["page"]()
    assert made == (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8"), "run: python docs/_site/gallery.py"
