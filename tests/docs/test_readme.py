"""The README says what is: its counterexample, its commands and its table. Its blocks and links are those of tests/docs/test_docs.py."""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", README, flags=re.DOTALL)


@pytest.mark.usefixtures("few_pixels")
def test_blocks_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for code, shown in BLOCKS:
        with redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        printed, expected = _words(out.getvalue()), _words(shown)
        assert len(printed) == len(expected), out.getvalue()
        for a, b in zip(printed, expected, strict=True):
            assert a == b if isinstance(a, str) else a == pytest.approx(b, rel=2e-2)


def _words(text: str) -> list[str | float]:
    """Return words and numbers, without the time taken."""
    words = re.findall(r"[^\s,()\[\]]+", re.sub(r"[\d.]+ s\n", "\n", text))
    return [float(word) if re.fullmatch(r"[+-]?[\d.]*\d(e[+-]?\d+)?", word) else word for word in words]


def test_the_counterexample_is_wrong_in_torch_and_right_here() -> None:
    names: dict[str, object] = {"__name__": "readme"}
    with redirect_stdout(io.StringIO()):
        exec(BLOCKS[0][0], names)
    mirrored = eval('hk.hessian(model, x, y)["0.weight", "1.weight"].T', names)
    ours, wrong = names["ours"], names["T"]
    assert (ours - mirrored).abs().max() < 1e-14  # type: ignore[operator]
    other = eval('torch.func.hessian(loss)(dict(model.named_parameters()))["0.weight"]["1.weight"].flatten(0, 1).T', names)
    assert (wrong - other).abs().max() > 0.1 * ours.abs().max()  # type: ignore[operator, union-attr]  # not symmetric


def test_installation_is_the_one_of_continuous_integration() -> None:
    assert '-c constraints.txt -e ".[study]" && .venv/bin/hessiankit study' in README
    assert '-c constraints.txt -e ".[test]" && .venv/bin/python -m pytest -n auto' in README
    assert '--constraint constraints.txt --editable ".[dev]"' in (ROOT / ".ci" / "run").read_text()


def test_the_table_of_speed_is_the_one_of_the_benchmarks() -> None:
    """Every problem, size, batch and time of the README's table stands in the measured page, too."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = README.split("<!-- benchmark summary -->")[1].split("<!-- /benchmark summary -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert len(rows) == 5
    for problem, size, batch, time, *_ in rows:
        value, unit = time.split()
        seconds = re.search(rf"^\| {problem} \| {size} \| {batch} \| float64 \| ([0-9.]+) \(", page, flags=re.MULTILINE)
        assert seconds is not None, (problem, batch)
        assert float(value) == pytest.approx(float(seconds[1]) * {"ms": 1e3, "s": 1.0}[unit], rel=2e-3)


def test_a_release_has_absolute_links() -> None:
    """The links of the README that a release ships lead to files of this tree at the release's tag."""
    page = runpy.run_path(str(ROOT / ".ci" / "absolute"))["absolute"](README, "https://host/owner/name", "v1")
    targets = re.findall(r"\]\(([^)]+)\)", page)
    local = [target.removeprefix(f"https://host/owner/name/{kind}/v1/") for target in targets for kind in ("blob", "raw")]
    assert len(targets) == len(re.findall(r"\]\([^)]+\)", README))
    assert all(target.startswith("https://") for target in targets)
    assert sum((ROOT / name).is_file() for name in local if not name.startswith("https:")) > 25
    assert page.count("![") == page.count("(https://host/owner/name/raw/v1/") == 2
