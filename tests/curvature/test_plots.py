"""The pictures: their colours are the numbers, their labels do not touch, their files are the same every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from curvature_reference import assert_one_clear_error
from figure_files import read
from matplotlib.colors import to_hex
from matplotlib.image import imread

import hessiankit as hk
from hessiankit.curvature.plot_frame import ZERO, colour_range, pooled, short_labels
from hessiankit.curvature.plots import block_norms_map, heatmap, row_chart, side_by_side

NAMES = ["a.W_Q", "a.b_K", "a.norm_1.weight"]
SIZES = [6, 2, 3]


def hessian(seed: int = 0) -> torch.Tensor:
    half = torch.randn(11, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = half + half.T
    matrix[6:8] = matrix[:, 6:8] = 1e-18  # zero to rounding, as the Hessian of a key bias is
    return matrix


def test_one_number_is_one_square_of_the_right_colour(tmp_path: Path) -> None:
    matrix = hessian()
    picture = heatmap(matrix, list("abcdefghijk"), [1] * 11, pixels=330, limits=(1e-2, 1e1), path=tmp_path / "h.png")
    image = imread(tmp_path / "h.png")
    box = picture.axes[0].get_window_extent()
    left, top = round(box.x0), image.shape[0] - round(box.y1)
    assert (round(box.width), round(box.height)) == (330, 330)
    colours = matplotlib.colormaps["viridis"]
    for (i, j), value in np.ndenumerate(matrix.numpy()):
        red, green, blue = image[top + 30 * i + 15, left + 30 * j + 15, :3]
        if abs(value) < 1e-15:
            assert to_hex((red, green, blue)) == ZERO
        else:
            expected = colours((np.log10(abs(value)) + 2) / 3)[:3]
            assert (red, green, blue) == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_the_same_numbers_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        heatmap(hessian(), NAMES, SIZES, title="H", path=tmp_path / name / f"h{suffix}", pixels=120)
    first, second = ((tmp_path / name / f"h{suffix}").read_bytes() for name in ("one", "two"))
    assert first == second


def test_the_table_behind_the_picture(tmp_path: Path) -> None:
    matrix = hessian()
    slices = {"a.W_Q": slice(0, 6), "a.b_K": slice(6, 8), "a.norm_1.weight": slice(8, 11)}
    side_by_side([matrix, 2 * matrix], NAMES, slices, titles=["x", "y"], path=tmp_path / "s.csv", pixels=60)
    rows = read(tmp_path / "s.csv")
    assert [(r["panel"], r["row"], r["column"]) for r in rows] == [(p, i, j) for p in "xy" for i in NAMES for j in NAMES]
    for row in rows:
        block = (1 + (row["panel"] == "y")) * matrix[slices[row["row"]], slices[row["column"]]]
        assert (int(row["rows"]), int(row["columns"])) == tuple(block.shape)
        assert float(row["max_abs"]) == pytest.approx(block.abs().max().item())
        assert float(row["rms"]) == pytest.approx(block.square().mean().sqrt().item())
        assert float(row["frobenius"]) == pytest.approx(torch.linalg.matrix_norm(block).item())
        assert float(row["zero_fraction"]) == (1.0 if "a.b_K" in (row["row"], row["column"]) else 0.0)


def test_both_panels_share_one_scale() -> None:
    matrix = hessian()
    picture = side_by_side([matrix, 100 * matrix], NAMES, SIZES, pixels=180)
    images = [axes.images[0] for axes in picture.axes[:2]]
    assert images[0].norm.vmin == images[1].norm.vmin
    assert images[0].norm.vmax == images[1].norm.vmax == pytest.approx(100 * matrix.abs().max().item())
    shown = np.asarray(images[0].get_array())[::10, ::10]  # 60 pixels a block
    assert np.array_equal(shown[:6, :6], matrix[:6, :6].abs().numpy())
    assert np.array_equal(shown[12::2, :6], matrix[8:, :6].abs().numpy())


def test_a_hessian_is_drawn_into_the_axes_of_the_user() -> None:
    figure, (left, right) = plt.subplots(1, 2)
    H = hk.hessian(hk.TransformerBlock(4, 5, 2), torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    assert H.plot(ax=right, title="mine") is figure
    (maps, *_) = right.child_axes
    assert maps.get_title() == "mine"
    (image,) = maps.get_images()
    assert image.get_array().max() == H.matrix.abs().max()
    assert len(right.child_axes) >= 2  # the map and its colour bar
    assert not left.child_axes
    assert figure.axes == [left, right]
    plt.close(figure)


def test_block_norms(tmp_path: Path) -> None:
    norms = [[45.02, 0.0, 123456.0], [0.012345, 1.0, 9.96], [1e-7, 0.1, 999.7]]
    picture = block_norms_map(norms, ["blocks.0.W_Q", "b", "c"], title="Norms", path=tmp_path / "n.csv")
    cells = [text.get_text() for text in picture.axes[0].texts[-9:]]
    assert cells == ["45", "0", "1.2e5", "0.012", "1.0", "10", "1.0e-7", "0.10", "1.0e3"]
    rows = read(tmp_path / "n.csv")
    assert [float(row["norm"]) for row in rows] == pytest.approx([x for line in norms for x in line])
    assert rows[3] == {"row": "b", "column": "blocks.0.W_Q", "norm": "0.012345"}


H = hessian()
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "sizes": (lambda: heatmap(H, NAMES, [6, 3, 3]), r"shape \(11, 11\), expected \(12, 12\)"),
    "slices": (lambda: heatmap(H, NAMES, {"a.W_Q": slice(0, 6)}), r"no slice for a\.b_K"),
    "limits": (lambda: heatmap(H, NAMES, SIZES, limits=(1.0, 0.1)), r"limits=\(1\.0, 0\.1\) are not the ends of a log scale"),
    "suffix": (lambda: heatmap(H, NAMES, SIZES, path="h.jpeg"), r"ends in \.png, \.svg, \.pdf"),
    "NaN": (
        lambda: heatmap(H.index_fill(0, torch.tensor(0), torch.nan), NAMES, SIZES),
        "11 entries of the matrix are not finite",
    ),
    "a negative norm": (lambda: block_norms_map([[-1.0]], ["a"]), "a norm is -1"),
    "norms": (lambda: block_norms_map([[1.0]], ["a", "b"]), r"block_norms_map: the matrix has shape \(1, 1\), expected \(2, 2\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_come_before_anything_is_drawn(name: str) -> None:
    assert_one_clear_error(*BAD[name])


def test_a_chart_of_rows_draws_every_number(tmp_path: Path) -> None:
    numbers = {"a": [1.0, 0.0, np.inf, np.nan], "b": [2.0, 4.0, 1e-3, 5.0]}
    axes = row_chart(
        "T.plot", ["p", "q", "r", "s"], numbers, axis="x", title="t", path=tmp_path / "t.csv", line=(1.0, "one")
    ).axes[0]
    low, high = axes.get_xlim()
    marks = [np.asarray(line.get_xdata()).tolist() for line in axes.lines]
    assert marks == [[1.0], [low], [high], numbers["b"], [1.0, 1.0]]  # 0 and infinity at the ends, NaN nowhere
    assert [float(row["b"]) for row in read(tmp_path / "t.csv")] == numbers["b"]
    bars = row_chart(
        "T.plot", ["p", "", "q"], {"S": [1.0, np.nan, 3.0]}, axis="x", title="", intervals=[(0.5, 2.0), (np.nan,) * 2, (3.0, 3.0)]
    )
    assert [bar.get_width() for bar in bars.axes[0].patches] == [1.0, 3.0]
    assert [segment.tolist() for segment in bars.axes[0].collections[0].get_segments()] == [[[0.5, 0.0], [2.0, 0.0]]]


def test_every_result_draws_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    block, x = hk.TransformerBlock(4, 5, placement="pre").double(), torch.randn(3, 4).double()
    H = hk.hessian(block, x, torch.zeros_like(x))
    image, expected = (p.axes[0].images[0].get_array() for p in (H.plot(), heatmap(H.matrix, H.names, H.slices)))
    assert np.array_equal(image, expected)
    model, tokens = hk.Transformer(7, 4, 5, 3, max_len=4, seed=0), torch.randint(7, (2, 4))
    depth = hk.depth_diagnostics(model, (tokens, tokens))
    bounds = hk.bounds(block, x, torch.zeros_like(x))
    for suffix in (".png", ".csv"):
        bounds.plot((tmp_path / "one").with_suffix(suffix))
        assert {p.suffix for p in tmp_path.glob("one.*")} == {".png", suffix}
    rows = read(tmp_path / "one.csv")
    assert float(rows[0]["structured"]) == pytest.approx(bounds.ratio("structured"))
    assert len(rows) == 30  # of more blocks
    panels = depth.plot(tmp_path / "depth.svg").axes
    assert panels[0].lines[0].get_ydata().tolist() == list(depth.stream.variance)
    assert {axes.get_title(loc="left") for axes in panels} >= {"norm of the gradient", "angular distance to the next layer"}


@pytest.mark.parametrize("width", [1, 3, 25])
def test_pooling_covers_every_entry_of_its_own_block(width: int) -> None:
    sizes = [5, 1, 40, 2, 17]
    matrix = np.random.default_rng(0).standard_normal((65, 65))
    picture = pooled(matrix, sizes, width)
    covered = []
    for size, offset in zip(sizes, np.cumsum([0, *sizes]), strict=False):
        starts = [size * k // width for k in range(width)]
        ends = [max(size * (k + 1) // width, start + 1) for k, start in enumerate(starts)]
        covered += [range(offset + start, offset + end) for start, end in zip(starts, ends, strict=True)]
    assert set().union(*covered) == set(range(65))
    for (i, j), seen in np.ndenumerate(picture):
        assert seen == np.abs(matrix[np.ix_(covered[i], covered[j])]).max()


def test_colour_range() -> None:
    values = 10.0 ** np.linspace(-9, 1, 1001)
    low, high = colour_range(values)
    assert (low, high) == (pytest.approx(1e-7), 10)
    assert (values < colour_range(values, span=20)[0]).sum() == 5
    assert colour_range(np.array([2.0, 3.0])) == (1.0, 10.0)
    assert colour_range(np.array([1.0])) == (1.0, 10.0)
    assert colour_range(np.zeros(3)) == (0.1, 1.0)


LETTERS = {
    "transformer.h.3.attn.c_attn.weight": r"$W_{QKV}$",
    "transformer.h.3.mlp.c_proj.bias": r"$b_2$",
    "transformer.ln_f.weight": r"$\gamma_f$",
    "model.layers.0.self_attn.q_proj.weight": r"$W_Q$",
    "model.layers.0.post_attention_layernorm.weight": r"$\gamma_2$",
    "model.layers.0.mlp.gate_proj.weight": r"$W_G$",
    "blocks.1.attn.proj.weight": r"$W_O$",
    "patch_embed.proj.weight": r"$W_E$",
    "encoder.layer.0.intermediate.dense.weight": r"$W_1$",
    "encoder.layer.0.attention.output.dense.weight": r"$W_O$",
    "lm_head.weight": r"$W_C$",
    "pos_embed": r"$P$",
    "0.weight": "0.weight",
    "mixer.dt_bias": "mixer.dt_bias",
}


def test_letters_of_other_libraries() -> None:
    assert {name: short_labels([name])[0] for name in LETTERS} == LETTERS
    assert short_labels(["encoder.fc1.weight", "decoder.fc1.weight", "fc2.weight"]) == [
        "encoder.fc1.weight",
        "decoder.fc1.weight",
        "$W_2$",
    ]  # names that would share a letter stay whole
