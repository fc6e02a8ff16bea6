"""The pictures: their colours are the numbers, their labels do not touch, their files are the same every time."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from figure_files import read
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.image import imread

import hessiankit as hk
from hessiankit.blocks import VisionTransformer
from hessiankit.curvature.plot_frame import ZERO, Picture
from hessiankit.curvature.plots import block_norms_map, heatmap, row_chart, side_by_side, write_numbers
from hessiankit.support.errors import InputError

NAMES = ["a.W_Q", "a.b_K", "a.norm_1.weight"]
SIZES = [6, 2, 3]


def hessian(seed: int = 0) -> torch.Tensor:
    half = torch.randn(11, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = half + half.T
    matrix[6:8] = matrix[:, 6:8] = 1e-18  # zero to rounding, as the Hessian of a key bias is
    return matrix


def vision_transformer() -> tuple[torch.Tensor, list[str], list[int]]:
    model = VisionTransformer(4, 16, 10, d_model=16, d_ff=64, bias=True, attention_bias=True)
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    return torch.rand(sum(sizes), sum(sizes), generator=torch.Generator().manual_seed(1)), names, sizes


def test_one_number_is_one_square_of_the_right_colour(tmp_path: Path) -> None:
    matrix = hessian()
    picture = heatmap(matrix, NAMES, SIZES, scale="parameters", pixels=110, limits=(1e-2, 1e1), path=tmp_path / "h.png")
    image = imread(tmp_path / "h.png")
    box = picture.axes[0].get_window_extent()
    left, top = round(box.x0), image.shape[0] - round(box.y1)
    assert (round(box.width), round(box.height)) == (110, 110)
    colours = matplotlib.colormaps["viridis"]
    for (i, j), value in np.ndenumerate(matrix.numpy()):
        red, green, blue = image[top + 10 * i + 5, left + 10 * j + 5, :3]
        if abs(value) < 1e-15:
            assert to_hex((red, green, blue)) == ZERO
        else:
            expected = colours((np.log10(abs(value)) + 2) / 3)[:3]
            assert (red, green, blue) == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize(("scale", "several"), [("blocks", False), ("parameters", True)])
def test_labels_neither_overlap_nor_leave_the_page(scale: str, several: bool) -> None:
    matrix, names, sizes = vision_transformer()
    picture = side_by_side([matrix, matrix], names, sizes, scale=scale) if several else heatmap(matrix, names, sizes, scale=scale)
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    renderer = canvas.get_renderer()
    page = picture.bbox
    boxes = [text.get_window_extent(renderer) for axes in picture.axes[: 1 + several] for text in axes.texts]
    assert len(boxes) == (3 if several else 2) * len(names)
    texts = [t.get_window_extent(renderer) for t in [*picture.texts, *(a.title for a in picture.axes)] if t.get_text()]
    ticks = [box for axes in picture.axes if (box := axes.yaxis.get_tightbbox(renderer)) is not None]
    for k, box in enumerate(boxes + texts + ticks):
        assert page.x0 <= box.x0 < box.x1 <= page.x1
        assert page.y0 <= box.y0 < box.y1 <= page.y1
        assert not any(box.shrunk(0.96, 0.96).overlaps(other.shrunk(0.96, 0.96)) for other in (boxes + texts)[k + 1 :])


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_the_same_numbers_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        heatmap(hessian(), NAMES, SIZES, title="H", path=tmp_path / name / f"h{suffix}", pixels=120)
    first, second = ((tmp_path / name / f"h{suffix}").read_bytes() for name in ("one", "two"))
    assert first == second


def test_the_table_beside_the_picture(tmp_path: Path) -> None:
    matrix = hessian()
    slices = {"a.W_Q": slice(0, 6), "a.b_K": slice(6, 8), "a.norm_1.weight": slice(8, 11)}
    order = ["a.norm_1.weight", "a.W_Q", "a.b_K"]
    side_by_side([matrix, 2 * matrix], NAMES, slices, order=order, titles=["x", "y"], path=tmp_path / "s.svg", pixels=60)
    rows = read(tmp_path / "s.csv")
    assert [(r["panel"], r["row"], r["column"]) for r in rows] == [(p, i, j) for p in "xy" for i in order for j in order]
    for row in rows:
        block = (1 + (row["panel"] == "y")) * matrix[slices[row["row"]], slices[row["column"]]]
        assert (int(row["rows"]), int(row["columns"])) == tuple(block.shape)
        assert float(row["max_abs"]) == pytest.approx(block.abs().max().item())
        assert float(row["rms"]) == pytest.approx(block.square().mean().sqrt().item())
        assert float(row["frobenius"]) == pytest.approx(torch.linalg.matrix_norm(block).item())
        assert float(row["zero_fraction"]) == (1.0 if "a.b_K" in (row["row"], row["column"]) else 0.0)


def test_both_panels_share_one_scale_and_order_permutes_rows_and_columns() -> None:
    matrix = hessian()
    picture = side_by_side(
        [matrix, 100 * matrix], NAMES, SIZES, order=["a.W_Q", "a.norm_1.weight"], scale="parameters", pixels=180
    )
    images = [axes.images[0] for axes in picture.axes[:2]]
    assert images[0].norm.vmin == images[1].norm.vmin
    assert images[0].norm.vmax == images[1].norm.vmax == pytest.approx(100 * matrix.abs().max().item())
    kept = [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert np.array_equal(np.asarray(images[0].get_array())[::20, ::20], matrix[kept][:, kept].abs().numpy())


def test_what_the_caption_says() -> None:
    matrix, names, sizes = vision_transformer()
    picture = heatmap(matrix, names, sizes)
    assert picture.caption.startswith("3514 × 3514 entries in log scale; blocks drawn equally")
    assert not picture.texts  # it is not drawn
    small = heatmap(hessian(), NAMES, SIZES, scale="parameters", pooling="rms", pixels=60)
    assert small.caption == "11 × 11 entries in log scale; grey: 0 to rounding, at most 2·10⁻¹⁵."
    pooled = heatmap(torch.rand(150, 150), ["a", "b"], [120, 30], scale="parameters", pooling="rms", zero_below=0.0, pixels=100)
    assert pooled.caption == "150 × 150 entries in log scale; each pixel: the root mean square of up to 2 × 2."


def test_block_norms(tmp_path: Path) -> None:
    norms = [[45.02, 0.0, 123456.0], [0.012345, 1.0, 9.96], [1e-7, 0.1, 999.7]]
    picture = block_norms_map(norms, ["blocks.0.W_Q", "b", "c"], title="Norms", path=tmp_path / "n.png")
    cells = [text.get_text() for text in picture.axes[0].texts[:9]]
    assert cells == ["45", "0", "1.2e5", "0.012", "1.0", "10", "1.0e-7", "0.10", "1.0e3"]
    rows = read(tmp_path / "n.csv")
    assert [float(row["norm"]) for row in rows] == pytest.approx([x for line in norms for x in line])
    assert rows[3] == {"row": "b", "column": "blocks.0.W_Q", "norm": "0.012345"}
    with pytest.raises(InputError, match="a norm is -1"):
        block_norms_map([[-1.0]], ["a"])
    with pytest.raises(InputError, match=r"block_norms_map: the matrix has shape \(1, 1\), expected \(2, 2\)"):
        block_norms_map([[1.0]], ["a", "b"])


def test_errors_come_before_anything_is_drawn() -> None:
    matrix = hessian()
    with pytest.raises(InputError, match=r"shape \(11, 11\), expected \(12, 12\)"):
        heatmap(matrix, NAMES, [6, 3, 3])
    with pytest.raises(InputError, match="3 names but sizes"):
        heatmap(matrix, NAMES, [6, 5])
    with pytest.raises(InputError, match=r"no slice for a\.b_K"):
        heatmap(matrix, NAMES, {"a.W_Q": slice(0, 6), "a.norm_1.weight": slice(6, 11)})
    with pytest.raises(InputError, match="2 labels for 3 blocks"):
        heatmap(matrix, NAMES, SIZES, labels=["x", "y"])
    with pytest.raises(InputError, match=r"order .* has unknown ones; there are: a\.W_Q"):
        heatmap(matrix, NAMES, SIZES, order=["z"])
    with pytest.raises(InputError, match="1 labels for 2 blocks"):
        block_norms_map(np.eye(2), ["a", "b"], labels=["x"])
    with pytest.raises(InputError, match=r"limits=\(1\.0, 0\.1\) are not the ends of a log scale"):
        heatmap(matrix, NAMES, SIZES, limits=(1.0, 0.1))
    with pytest.raises(InputError, match="2 matrices but 1 titles"):
        side_by_side([matrix, matrix], NAMES, SIZES, titles=["x"])
    with pytest.raises(InputError, match=r"ends in \.png, \.svg, \.pdf"):
        heatmap(matrix, NAMES, SIZES, path="h.jpeg")
    matrix[0, 0] = torch.nan
    with pytest.raises(InputError, match="1 entries of the matrix are not finite"):
        heatmap(matrix, NAMES, SIZES)


def test_pictures_show_themselves_in_a_notebook_and_leave_matplotlib_alone() -> None:
    before = dict(matplotlib.rcParams)
    picture = heatmap(hessian(), NAMES, SIZES, pixels=60)
    assert isinstance(picture, Picture)
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_write_numbers_quotes_what_needs_it(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "new" / "t.csv", ("name", "x"), [("a, b", 1), ("c", 2.5)])
    assert path.read_bytes() == b'name,x\n"a, b",1\nc,2.5\n'


def test_a_chart_of_rows_draws_every_number(tmp_path: Path) -> None:
    numbers = {"a": [1.0, 0.0, np.inf, np.nan], "b": [2.0, 4.0, 1e-3, 5.0]}
    axes = row_chart(
        "T.plot", ["p", "q", "r", "s"], numbers, axis="x", title="t", path=tmp_path / "t.png", line=(1.0, "one")
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
    assert np.array_equal(
        H.plot().axes[0].images[0].get_array(), heatmap(H.matrix, H.names, H.slices).axes[0].images[0].get_array()
    )
    model, tokens = hk.Transformer(7, 4, 5, 3, max_len=4, seed=0), torch.randint(7, (2, 4))
    sharp, depth = hk.sharpness(model, (tokens, tokens)), hk.depth_diagnostics(model, (tokens, tokens))
    bounds = hk.bounds(block, x, torch.zeros_like(x))
    check = hk.check(
        block, x, torch.zeros_like(x), against=("reverse-over-reverse", "jvp(grad)"), formulas=False, params=["attention.*"]
    )
    rows = {}
    for one in (sharp, bounds, check):
        one.plot(tmp_path / "one.png")
        rows[type(one).__name__] = read(tmp_path / "one.csv")
    assert [row["row"] for row in rows["SharpnessReport"]] == [
        *sharp.types,
        "",
        "outside blocks",
        "block 0",
        "block 1",
        "block 2",
    ]
    assert float(rows["SharpnessReport"][0]["low"]) == pytest.approx(sharp.types["Emb"].low)
    assert float(rows["BoundsReport"][0]["structured"]) == pytest.approx(bounds.ratio("structured"))
    assert len(rows["BoundsReport"]) == 30  # of more blocks
    worst = max(max(float(row[name]) for name in check.references) for row in rows["CheckReport"])
    assert worst == pytest.approx(max(row.max_rel_error for row in check.rows if not row.of_same_call))
    panels = depth.plot(tmp_path / "depth.svg").axes
    assert panels[0].lines[0].get_ydata().tolist() == list(depth.stream.variance)
    assert {axes.get_title(loc="left") for axes in panels} >= {"norm of the gradient", "angular distance to the next layer"}
