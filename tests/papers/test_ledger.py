"""The ledger: rows are complete, a verdict that is not found again fails loudly, and the page in docs says what the rows say."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hessiankit.support.errors import InputError
from papers import PAPERS, Claim, Ledger, claim, claims
from papers import evidence as show
from papers.__main__ import main
from papers.errata import ERRATA, errata_page, without_counterexamples
from papers.ledger_report import run_row
from papers.pages import in_words, verdict_of, without_evidence

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
ones = torch.ones(3, dtype=torch.float64)


def row(compute, verdict="HOLDS", **fields) -> Claim:
    return Claim("ours/made-up", "here", "$1 = 1$", verdict, compute, **fields)


@pytest.fixture(scope="module")
def everything():
    return claims()


# The rows -------------------------------------------------------------------------------------------------------------


def test_every_row_is_complete(everything):
    assert len(everything) > 100
    assert len({c.id for c in everything}) == len({c.anchor for c in everything}) == len(everything)
    for c in everything:
        assert c.paper in PAPERS, c.id
        assert c.id == c.id.lower(), c.id
        assert not set(c.id) & set("*?[] "), c.id
        for text in (c.statement, c.corrected or "", c.assumption or ""):
            assert text.count("$") % 2 == 0, c.id
            assert text.count("{") == text.count("}"), c.id


def test_a_wrong_print_leads_to_its_root(everything):
    rows = {c.id: c for c in everything}
    for c in everything:
        assert (c.severity is None) == (c.verdict != "WRONG AS PRINTED"), c.id
        ahead = list(c.follows_from)
        for id in ahead:
            assert id in rows, f"{c.id} follows from {id}"
            assert id != c.id, f"{c.id} follows from itself"
            ahead += [root for root in rows[id].follows_from if root not in ahead]


def test_root_causes_are_counted_once(everything):
    factor = [c for c in everything if c.id == "curvature-gap/phi_qq" or "curvature-gap/phi_qq" in c.follows_from]
    factor = [c for c in factor if c.id != "curvature-gap/eq6-printed"]  # has other roots, too
    assert len(factor) == 7
    assert in_words(factor) == "1 root cause at 7 places (1 constant)"
    assert verdict_of(factor[1]) == "WRONG AS PRINTED (constant; root: phi_qq)"
    assert verdict_of(next(c for c in everything if c.verdict == "HOLDS")) == "HOLDS"


def test_what_reading_decides_is_not_called_open(everything):
    names = "sharpness-disparity/wsd-floor sharpness-disparity/switch sharpness-disparity/code-beta2 hybridnorm/table6-9192"
    for c in everything:
        if c.id in {*names.split(), "curse-of-depth/lns-code", "hybridnorm/table3-default"}:
            assert c.verdict == "INCONSISTENT", c.id


def test_closed_forms_are_where_the_rows_say(everything):
    for source in {source for c in everything for source in c.sources}:
        module = source
        while module not in sys.modules:
            module = module.rpartition(".")[0]
            assert module, source
        found = sys.modules[module]
        for name in source[len(module) + 1 :].split("."):
            found = getattr(found, name)
        assert callable(found), source


def test_a_sample_is_reproduced_from_a_third_seed(everything):
    report = Ledger(everything.rows[::30]).run(seed=11)
    assert report, "\n".join(map(str, report.failures))


# What a verdict can rest on -------------------------------------------------------------------------------------------

PASS_AND_FAIL = [
    (lambda: show.agrees(ones, ones * (1 + 1e-13)), lambda: show.agrees(ones, ones * (1 + 1e-9))),
    (lambda: show.small([0.0, 1e-12]), lambda: show.small([0.0, 1e-9])),
    (lambda: show.small(0.0), lambda: show.small(math.nan)),
    (lambda: show.counts(3, 3), lambda: show.counts(3, 4)),
    (lambda: show.bounded([0.2, 1.0], attained=0.9), lambda: show.bounded([0.2, 0.8], attained=0.9)),
    (lambda: show.loose([0.2, 0.5], factor=2), lambda: show.loose([0.2, 0.6], factor=2)),
    (lambda: show.wrong(2 * ones, ones, corrected=ones), lambda: show.wrong(ones, ones, corrected=ones)),
    (lambda: show.wrong(2 * ones, ones, corrected=ones), lambda: show.wrong(2 * ones, ones, corrected=3 * ones)),
    (lambda: show.violated(2.0, 1.0, corrected=2.5), lambda: show.violated(0.9, 1.0, corrected=1.0)),
    (lambda: show.violated(2.0, 1.0, corrected=2.5), lambda: show.violated(2.0, 1.0, corrected=1.9)),
    (
        lambda: show.wrong(2 * ones, ones, corrected=ones, second=ones),
        lambda: show.wrong(2 * ones, ones, corrected=ones, second=2 * ones),
    ),
    (lambda: show.violated(2.0, 1.0, corrected=3.0, second=2.0), lambda: show.violated(2.0, 1.0, corrected=3.0, second=2.1)),
    (lambda: show.bounded([[0.2, 1.0], [0.9]], attained=0.8), lambda: show.bounded([[0.2, 1.0], [0.5]], attained=0.8)),
    (lambda: show.bounded([0.2, 1.0]), lambda: show.bounded([0.2, 1.01])),
    (lambda: show.assumed(show.small(0.0), 2.0, above=1), lambda: show.assumed(show.small(0.0), 0.5, above=1)),
    (lambda: show.assumed(show.small(0.0), 2.0, above=1), lambda: show.assumed(show.small(1.0), 2.0, above=1)),
    (lambda: show.readings({"a": 1.0, "b": 2.0}), lambda: show.readings({"a": 1.0, "b": 1.0})),
    (lambda: show.measured(1.0, True), lambda: show.measured(1.0, False)),
]


@pytest.mark.parametrize(("passes", "fails"), PASS_AND_FAIL)
def test_evidence_can_fail(passes, fails):
    assert passes().reproduced
    assert not fails().reproduced
    assert str(passes())


def test_errors_are_relative_to_the_largest_entry():
    assert show.relative_error([0.0, 4.0], [1.0, 4.0]) == 0.25
    assert show.relative_error([1.0], [1.0, 2.0]) == math.inf
    assert show.relative_error([math.nan], [1.0]) == math.inf
    assert show.relative_error([0.5], [0.0]) == 0.5
    assert show.relative_error(torch.zeros(0), torch.zeros(0)) == 0


# A verdict that is not found again ------------------------------------------------------------------------------------


def test_a_verdict_that_is_not_found_again():
    broken = row(lambda seed: show.agrees(2 * ones, ones, "two and one"))
    report = Ledger((row(lambda seed: show.small(0.0)), broken, row(lambda seed: show.not_run("no"), "NOT RUN"))).run()
    assert not report
    assert [failure.claim for failure in report.failures] == [broken]
    assert "1 of 2 verdicts reproduced, 1 not run" in report.table()
    assert "ours/made-up (here): HOLDS NOT reproduced: relative error 1; two and one" in report.table()


def test_a_computation_that_fails_is_a_row_that_fails():
    def compute(seed):
        raise ZeroDivisionError("by zero\nsecond line")

    report = Ledger((row(compute), row(lambda seed: show.small(0.0)))).run()
    assert [ran.reproduced for ran in report.rows] == [False, True]
    assert report.rows[0].error == "ZeroDivisionError: by zero"
    report = Ledger((row(lambda seed: show.wrong(1.0, 2.0, corrected=2.0)),)).run()
    assert "its verdict is HOLDS and its computation shows error; expected one of agreement, bound" in report.rows[0].error


def test_the_seed_reaches_the_computation_and_the_report():
    report = Ledger((row(lambda seed: show.counts(seed, 7)),)).run(seed=7)
    assert report
    assert report.rows[0].evidence.seed == report.seed == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "hybridnorm/eq14"}, "is taken"),
        ({"id": "adam/eq1"}, "does not begin with a paper"),
        ({"verdict": "TRUE"}, "unknown verdict 'TRUE'"),
        ({"doc": ""}, "needs a statement in its docstring"),
        ({"place": ""}, "needs place"),
        ({"verdict": "WRONG AS PRINTED"}, "needs a paragraph that begins with 'Correct:'"),
        ({"verdict": "WRONG AS PRINTED", "doc": "it\nCorrect: that"}, "needs a paragraph that begins with 'Severity:'"),
        ({"verdict": "WRONG AS PRINTED", "doc": "it\nCorrect: that\nSeverity: grave"}, "severity 'grave' of WRONG AS PRINTED"),
        ({"doc": "it\nSeverity: constant"}, "severity 'constant' of HOLDS"),
        ({"verdict": "HOLDS UNDER ASSUMPTION"}, "needs a paragraph that begins with 'Needs:'"),
    ],
)
def test_incomplete_rows_are_refused(everything, fields, message):
    given = {"id": "ours/new", "place": "here", "verdict": "HOLDS", "doc": "it", **fields}

    def compute(seed):
        raise AssertionError

    compute.__doc__ = given["doc"]
    with pytest.raises(ValueError, match=message):
        claim(given["id"], given["place"], given["verdict"])(compute)


# What users call ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paper": "adam"}, "paper='adam' is not known; choose one of curvature-gap"),
        ({"verdict": "TRUE"}, "verdict='TRUE' is not known; did you mean .* Choose one of HOLDS"),
        ({"id": "hybridnorm/eq199"}, "id='hybridnorm/eq199' is not known; did you mean 'hybridnorm/eq19'"),
    ],
)
def test_unknown_names(options, message):
    with pytest.raises(InputError, match=message):
        claims(**options)


def test_a_ledger_prints(everything):
    some = claims(id="hybridnorm/eq2?")
    text, html = some.table(), some._repr_html_()
    for c in some:
        assert c.id in text
        assert c.id in html
    assert "$" not in text
    assert f"hybridnorm: {len(some)} rows" in text
    assert {c.verdict for c in claims(paper="hybridnorm", verdict="wrong as printed")} == {"WRONG AS PRINTED"}
    report = some[:2].run()
    assert json.loads(json.dumps(report.to_dict()))["reproduced"] is True
    assert some.html(report).count("<tr id=") == len(some)
    assert str(some[0]).splitlines()[0] == f"id          {some[0].id}"


def test_the_page_in_docs_is_true(everything):
    page = PAGE.read_text(encoding="utf-8")
    command = "python -m papers run --markdown docs/claims.md"
    assert without_evidence(page) == without_evidence(everything.markdown()), f"run: {command}"
    assert "not reproduced" not in page
    assert all(line.rsplit(" | ", 1)[1] != " |" for line in page.splitlines() if line.startswith("| <a id"))


@pytest.mark.parametrize("paper", list(ERRATA))
def test_the_pages_of_corrections_are_true(everything, paper):
    rows = {c.id: c for c in everything}
    blank = {name: run_row(row(lambda seed: show.small(0.0))) for name in rows}
    page = (PAGE.parent / "errata" / f"{paper}.md").read_text(encoding="utf-8")
    expected = without_counterexamples(errata_page(paper, rows, blank))
    assert without_counterexamples(page) == expected, "run: python -m papers errata --out docs/errata"
    assert "not reproduced" not in page
    for name, _ in ERRATA[paper].wrong:
        assert rows[f"{paper}/{name}"].verdict in ("WRONG AS PRINTED", "DOES NOT FOLLOW"), name


def test_a_wrong_row_keeps_what_it_compared(everything):
    for name in ("curvature-gap/phi_vq", "hybridnorm/eq34", "curse-of-depth/eq33", "sharpness-disparity/norm"):
        found = run_row(next(c for c in everything if c.id == name)).evidence
        assert len(found.arrays) >= 3, name
        assert "correct" in found.printed_arrays()
        assert json.loads(json.dumps(found.to_dict()))["arrays"]


def test_pages_of_corrections_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("papers.ledger.ERRATA", {"hybridnorm": ERRATA["hybridnorm"]})  # each page runs its rows
    assert main(["errata", "--out", str(tmp_path / "pages")]) == 0
    assert "Counterexample: " in (tmp_path / "pages" / "hybridnorm.md").read_text(encoding="utf-8")


def test_command_line_when_a_verdict_is_not_found_again(monkeypatch, capsys):
    broken = row(lambda seed: show.small(1.0, "broken on purpose"))
    monkeypatch.setattr("papers.ledger.rows", lambda paper: (broken,))
    assert main(["run"]) == 1
    assert "ours/made-up (here): HOLDS NOT reproduced: relative error 1; broken on purpose" in capsys.readouterr().out
    assert main(["show", "ours/*"]) == 1


def test_a_wrong_formula_needs_a_second_route():
    def compute(seed):
        return show.wrong(2 * ones, ones, corrected=ones)

    alone = row(compute, "WRONG AS PRINTED", corrected="$1$")
    with pytest.raises(TypeError, match="one route gives the reference"):
        alone.evidence(0)
    assert not run_row(alone).reproduced
    twice = replace(alone, compute=lambda seed: show.wrong(2 * ones, ones, corrected=ones, second=ones, by="by hand"))
    assert twice.evidence(0).second == "by hand, to 0"
