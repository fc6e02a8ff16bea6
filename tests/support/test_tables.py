"""Tables: the same words and numbers in plain text and in HTML, and nothing cut short."""

from __future__ import annotations

import re
from html import unescape

from hessiankit.support.tables import as_html, as_text, table

ROWS = [("W_Q", "4 x 2", "0.125"), ("norm_1.weight", "4", "12.5")]
HEADERS = ("parameter", "shape", "norm")


def test_text_columns_are_on_the_left_and_numbers_on_the_right():
    lines = [line for line in as_text(table(HEADERS, ROWS, left=2)).splitlines() if "weight" in line or "W_Q" in line]
    assert lines[0].index("4 x 2") == lines[1].index("4 ", 14)
    assert len(lines[0]) == len(lines[1])
    numbers = [line for line in as_text(table(HEADERS, ROWS, left=1)).splitlines() if "weight" in line or "W_Q" in line]
    assert numbers[0].index("4 x 2") + 5 == numbers[1].index(" 4 ") + 2


def test_no_markup_no_colour_no_trailing_space():
    text = as_text("[bold]t[/bold] :smile:", table(("a", "b"), [("[red]x[/red]", ":smile:")], title="a title"))
    assert "[bold]t[/bold] :smile:" in text
    assert "[red]x[/red]" in text
    assert "a title" in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text == text.strip("\n")


def test_long_names_are_not_cut():
    long, number = "module." * 40 + "weight", "1" * 90
    text = as_text(table(("name", "value"), [(long, number)]))
    assert long in text
    assert number in text
    assert "…" not in text
    assert as_text("a " * 300).split() == ["a"] * 300


def test_html_has_the_same_cells():
    html = as_html(HEADERS, iter(ROWS), caption="title")
    assert re.findall(r"<th[^>]*>(.*?)</th>", html) == list(HEADERS)
    assert re.findall(r"<td[^>]*>(.*?)</td>", html) == [cell for row in ROWS for cell in row]
    assert "<caption>title</caption>" in html


def test_html_is_escaped():
    html = as_html(("<a>",), [("<script>&",)], caption='"<b>"')
    assert [unescape(text) for text in re.findall(r">([^<\n]+)<", html)] == ['"<b>"', "<a>", "<script>&"]
