"""The notebooks are those of their scripts, and what runs them notices where they are not. CI runs ``python -m notebooks``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from notebooks import _paired  # noqa: E402
from notebooks._execution import MAX_BYTES  # noqa: E402
from notebooks._paired import drift, notebook_of, scripts  # noqa: E402


def test_there_are_seven() -> None:
    assert [path.stem for path in scripts()] == [
        "analytic_against_automatic", "bounds_and_slack", "check_in_a_test", "formula_to_code", "spectrum_and_approximations", "tour_of_derive", "your_own_model",
    ]  # fmt: skip


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script_and_their_outputs(script: Path) -> None:
    assert drift(script) is None
    path = script.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MAX_BYTES
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_paired, "FOLDER", tmp_path)
    path = tmp_path / "small.py"
    path.write_text("# %% [markdown]\n# # A title\n\n# %%\nprint(6 * 7)\n")
    return path


def test_drift_is_named(script: Path) -> None:
    assert drift(script) == "small.ipynb is missing"
    nbformat.write(notebook_of(script), script.with_suffix(".ipynb"))
    assert drift(script) is None
    script.write_text(script.read_text().replace("6 * 7", "6 * 8"))
    assert drift(script) == "cell 2 of small.ipynb is not that of small.py: 'print(6 * 7)' in place of 'print(6 * 8)'"
    script.write_text("# %% [markdown]\n# # A title\n")
    assert drift(script) == "small.ipynb has more cells than small.py, from cell 2 on"
