"""The notebooks are those of their scripts, and what runs them notices where they are not. CI runs ``python -m notebooks``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from hessiankit.support.tables import as_text, table  # noqa: E402
from notebooks import _paired  # noqa: E402
from notebooks._execution import MAX_BYTES, NotebookError, execute  # noqa: E402
from notebooks._paired import drift, notebook_of, scripts  # noqa: E402


def test_there_are_six() -> None:
    assert [path.stem for path in scripts()] == [
        "analytic_against_automatic", "bounds_and_slack", "check_in_a_test", "spectrum_and_approximations", "tour_of_derive", "your_own_model",
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


@pytest.mark.slow
def test_a_run_keeps_outputs_and_refuses_warnings_and_paths(script: Path) -> None:
    done = execute(notebook_of(script))
    assert done.cells[1].outputs[0].text == "42\n"
    assert done.cells[1].execution_count == 1
    script.write_text("# %%\nimport warnings\n\nwarnings.warn('careful')\n")
    with pytest.raises(NotebookError, match="UserWarning: careful"):
        execute(notebook_of(script))
    script.write_text("# %%\nimport os\n\nprint(os.getcwd())\n")
    with pytest.raises(NotebookError, match="names of files, not where they lie"):
        execute(notebook_of(script))


def test_text_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook rich displays what it is asked to print; then a result would be seen twice."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "42" in as_text(table(["answer"], [["42"]]))
