r"""Formulas as GitHub reads them become MathML while the site is built: showing them takes neither a script nor a network.

Inline: $`...`$ and $...$; on lines of their own: $$...$$ and fences named ``math``. A formula that cannot be converted stops the
build with the formula in the message.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from math_core import LatexError, LatexToMathML
from mkdocs.exceptions import PluginError

CONVERTER = LatexToMathML(fancy_error=False)
AS_CODE = r"\$`([^`]+)`\$"
DISPLAYED = r"(?<!\\)\$\$(.+?)\$\$"
INLINE = r"(?<![\\$\w])\$(?![\s$])([^$]*[^\s$\\])\$(?![\w$])"


LONG = 20
"""An inline formula of more characters, markup left out, gets a line of its own in a narrow window. The line scrolls."""


def mathml(formula: str, *, display: bool = False) -> str:
    """Return a formula as MathML; one on lines of its own in a box that scrolls where the window is too narrow.

    >>> "<mi>x</mi>" in mathml("x"), mathml("x").startswith("<math"), mathml("+".join("abcdefghijkl")).startswith("<span")
    (True, True, True)
    """
    try:
        found: str = CONVERTER.convert_with_local_state(formula.strip(), displaystyle=display)
    except LatexError as error:
        raise PluginError(f"maths: {formula!r} cannot be converted: {error}; expected LaTeX that GitHub shows too") from error
    if display:
        return f'<span class="formula">{found}</span>'
    return f'<span class="long">{found}</span>' if len(re.sub(r"<[^>]*>|\s", "", found)) > LONG else found


class Formula(InlineProcessor):
    """What a pattern finds, stored as MathML before emphasis and escapes are looked for in it."""

    def __init__(self, pattern: str, md: Markdown, *, display: bool) -> None:
        super().__init__(pattern, md)
        self.compiled_re = re.compile(pattern, re.DOTALL)
        self.display = display

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:
        """Store the formula of a match."""
        stored: str = self.md.htmlStash.store(mathml(m.group(1), display=self.display))
        return stored, m.start(), m.end()


class Maths(Extension):
    """Formulas in the text; code spans (priority 190) go before those with bare dollars."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the three patterns."""
        md.inlinePatterns.register(Formula(AS_CODE, md, display=False), "maths as code", 195)
        md.inlinePatterns.register(Formula(DISPLAYED, md, display=True), "maths displayed", 187)
        md.inlinePatterns.register(Formula(INLINE, md, display=False), "maths inline", 186)


def fence(source: str, *_: Any, **__: Any) -> str:
    """Return the formula of a fence named ``math``."""
    return mathml(source, display=True)


def on_config(config: Any) -> Any:
    """Add the formulas to what the site reads as Markdown."""
    config.markdown_extensions.append(Maths())
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "math", "format": fence})
    return config
