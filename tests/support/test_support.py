"""Lanczos with restarts, files on a full disk, state that is put back, tables, and the version of code."""

from __future__ import annotations

import errno
import random
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import hessiankit as hk
from hessiankit.curvature.plot_frame import write_numbers, write_picture
from hessiankit.support import environment
from hessiankit.support.files import STDOUT, output_for, write_text
from hessiankit.support.lanczos import lanczos
from hessiankit.support.tables import as_html, as_text, table
from hessiankit.support.torch_state import preserved_state

# Lanczos with restarts ------------------------------------------------------------------------------------------------


def symmetric(size: int, seed: int = 0) -> torch.Tensor:
    A = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A + A.T


def start(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize(("size", "basis"), [(1, 20), (2, 3), (7, 3), (60, 5), (60, 20), (300, 12)])
def test_the_largest_eigenvalue_is_found_with_few_vectors(size, basis):
    A = symmetric(size)
    found = lanczos(A.matmul, start(size), tol=1e-10, most=5000, basis=basis)
    values, vectors = torch.linalg.eigh(A)
    assert found.converged
    assert abs(found.value - float(values[-1])) <= 1e-10 * float(values.abs().max())
    assert abs(float(found.vector @ vectors[:, -1])) > 1 - 1e-10
    assert found.residual == pytest.approx(float((A @ found.vector - found.value * found.vector).norm()), rel=1e-6)


def test_a_negative_matrix_has_its_largest_eigenvalue_too():
    A = -symmetric(30) @ symmetric(30)
    found = lanczos(A.matmul, start(30), tol=1e-9, most=500)
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(A)[-1]), abs=1e-7 * float(A.norm()))


def test_when_products_run_out_the_residual_says_so():
    A = symmetric(300)
    counted = []
    found = lanczos(lambda v: counted.append(1) or A @ v, start(300), tol=1e-12, most=10)
    assert found.products == len(counted) == 10
    assert not found.converged
    assert "not converged" in repr(found)
    values = torch.linalg.eigvalsh(A)
    assert found.value < float(values[-1])
    assert (values - found.value).abs().min() <= found.residual


@pytest.mark.parametrize("basis", [4, 20])
def test_a_matrix_that_is_not_symmetric_is_refused(basis):
    A = symmetric(40)
    A[3, 5] += 0.01
    with pytest.raises(hk.InputError, match=r"differ by .* of \|Hv\|, more than rounding"):
        lanczos(A.matmul, start(40), tol=1e-14, most=400, basis=basis)


def test_products_that_are_not_finite_are_refused():
    with pytest.raises(hk.InputError, match="product 1 with the matrix is NaN or infinite"):
        lanczos(lambda v: v / 0 - v / 0, start(5))


# Files on a full disk: one line that names the file, and what was there before stays ----------------------------------

FULL = OSError(errno.ENOSPC, "No space left on device")


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writing files fail half-way."""
    write = Path.write_bytes

    def torn(path: Path, content: bytes) -> None:
        write(path, content[: len(content) // 2])
        raise FULL

    monkeypatch.setattr(Path, "write_bytes", torn)


def test_a_picture_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new folder" / "a.png"
    write_picture("plots", Figure(), path)
    before = path.read_bytes()
    full_disk(monkeypatch)
    with pytest.raises(hk.InputError, match=r"^plots: cannot write .*a\.png: No space left on device; name a file"):
        write_picture("plots", Figure(figsize=(1, 1)), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]


def test_a_table_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbers(tmp_path / "t.csv", ("a", "b"), [(1, 2)])
    full_disk(monkeypatch)
    with pytest.raises(hk.InputError, match=r"cannot write .*t\.csv: No space left"):
        write_numbers(path, ("a", "b"), [(3, 4)])
    assert path.read_text() == "a,b\n1,2\n"


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(hk.InputError, match=r"cannot make the folder .*taken: File exists; name another one"):
        write_picture("plots", Figure(), tmp_path / "taken" / "a.svg")


def test_prints_go_to_standard_error_where_the_output_is_reserved(capsys: pytest.CaptureFixture[str]) -> None:
    """A table printed on the way does not end up in a file named ``-``."""
    with output_for([STDOUT]):
        print("on the way")
        write_text("plots", STDOUT, "the file\n")
    assert capsys.readouterr() == ("the file\n", "on the way\n")


# State that preserved_state puts back, also after an error ------------------------------------------------------------


def _measure_and_stop(model: nn.Module) -> None:
    with torch.no_grad(), preserved_state(model):
        assert torch.is_grad_enabled()
        assert not any(module.training for module in model.modules())
        assert all(p.grad is None for p in model.parameters())
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        model[1].running_mean.add_(1.0)
        model.requires_grad_(True)
        model.train()
        model(torch.randn(4, 2)).sum().backward()
        raise KeyboardInterrupt


def test_everything_is_put_back_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = gradient = torch.ones(2, 2)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(KeyboardInterrupt):
        _measure_and_stop(model)
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2, 2))
    assert model[1].weight.grad is None
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # noqa: NPY002


def test_flags_that_torch_forbids_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.m, "__allow_nonbracketed_mutation_flag", False)  # as disable_global_flags() does
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert hk.hessian(
            nn.LSTM(3, 2).double(), start(3)[None], start(2), loss=lambda z, t: (z[0] - t).square().sum()
        ).matrix.any()
        assert torch.backends.cudnn.enabled
        assert torch.backends.cudnn.allow_tf32


def test_buffers_that_did_not_change_are_not_written():
    model = nn.BatchNorm1d(2)
    versions = [b._version for b in model.buffers()]
    with preserved_state(model):
        model(torch.randn(3, 2))
    assert [b._version for b in model.buffers()] == versions


# Tables: the same words and numbers in plain text and in HTML ---------------------------------------------------------

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


# The version of code --------------------------------------------------------------------------------------------------


def test_a_version_is_that_of_the_code_it_names() -> None:
    versions = {
        environment.code_version(name) for name in ("hessiankit/__init__.py", "hessiankit/cli/__init__.py", "derivations")
    }
    assert len(versions) == 3
    assert environment.code_version("derivations") in versions
