"""The arithmetic behind the pictures of a Hessian: short names, pixels for entries, labels that do not overlap."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hessiankit.errors import InputError

SCALES = ("blocks", "parameters")
POOLINGS = ("max", "rms")

_LINEAR = (
    (r"in_proj|c_attn|qkv|Wqkv", "QKV"),
    (r"(self_attn|attention|attn)\.(.*\.)?(out_proj|o_proj|c_proj|dense|proj)|o_proj|wo", "O"),
    (r"query|q_proj|wq|to_q", "Q"),
    (r"key|k_proj|wk|to_k", "K"),
    (r"value|v_proj|wv|to_v", "V"),
    (r"linear1|fc1|c_fc|fc_in|up_proj|intermediate(\.dense)?", "1"),
    (r"linear2|fc2|fc_out|down_proj|mlp.*c_proj|output\.dense", "2"),
    (r"gate_proj", "G"),
    (r"patch_embed.*|wte|embed_tokens|tok_emb.*|embedding|embed|embeddings.*word.*", "E"),
    (r"lm_head|head|classifier|fc|unembed", "C"),
)
_NORM = (
    (r"(norm|ln|layernorm)_?1|input_layernorm|layernorm_before", "1"),
    (r"(norm|ln|layernorm)_?2|post_attention_layernorm|layernorm_after", "2"),
    (r"(norm|ln)_?f|norm|final_norm|final_layernorm|layernorm", "f"),
)
_POSITION = r"(.*\.)?(P|position|pos_embed|wpe|pos_emb|positional_embedding|position_embeddings?)"


def short_labels(names: Sequence[str]) -> list[str]:
    """Return the papers' letters for parameter names, in Matplotlib's math text.

    A name whose letters are not known, or would be another one's too, is kept as it is. Where several layers take part
    their index follows the letter's.

    >>> short_labels(["blocks.0.attention.W_Q", "blocks.0.norm_1.weight", "position", "my.scale"])
    ['$W_Q$', '$\\\\gamma_1$', '$P$', 'my.scale']
    >>> short_labels(["h.0.mlp.c_fc.bias", "h.1.mlp.c_fc.bias"])
    ['$b_{1,0}$', '$b_{1,1}$']
    """
    layers = [re.search(r"(?:^|\.)(\d+)\.", name) for name in names]
    several = len({layer.group(1) for layer in layers if layer}) > 1
    labels = []
    for name, layer in zip(names, layers, strict=True):
        letters = _letters(re.sub(r"(^|\.)\d+(?=\.)", "", name).lstrip("."))
        if letters is None:
            labels.append(name)
            continue
        letter, index = letters
        index = ",".join(part for part in (index, layer.group(1) if several and layer else "") if part)
        subscript = index if len(index) == 1 else f"{{{index}}}"
        labels.append(f"${letter}_{subscript}$" if index else f"${letter}$")
    count = Counter(labels)
    return [label if count[label] == 1 else name for name, label in zip(names, labels, strict=True)]


def block_pixels(sizes: Sequence[int], pixels: int, scale: str) -> np.ndarray:
    """Return how many of ``pixels`` each block takes along one axis: equally many, or in proportion to its size.

    Every block keeps at least one pixel; the widths add up to ``pixels`` (to the number of blocks, if that is more).

    >>> block_pixels([1, 1, 10], 12, "blocks").tolist(), block_pixels([1, 1, 10], 12, "parameters").tolist()
    ([4, 4, 4], [1, 1, 10])
    """
    if scale not in SCALES:
        raise InputError(f"heatmap: scale={scale!r} is not known; choose 'blocks' or 'parameters'")
    weights = np.ones(len(sizes)) if scale == "blocks" else np.asarray(sizes, dtype=float)
    edges = np.round(np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum() * pixels).astype(int)
    widths = np.maximum(np.diff(edges), 1)
    while widths.sum() > max(pixels, len(sizes)):  # blocks rounded up to a pixel take it from the widest
        widths[widths.argmax()] -= 1
    return widths


def pixel_starts(sizes: Sequence[int], widths: Sequence[int]) -> np.ndarray:
    """Return the first entry that each pixel covers, for blocks of ``sizes`` entries drawn ``widths`` pixels wide.

    A pixel covers the entries up to the next pixel's first one, and one entry where both are the same.

    >>> pixel_starts([4, 1], [2, 3]).tolist()
    [0, 2, 4, 4, 4]
    """
    starts = []
    offset = 0
    for size, width in zip(sizes, widths, strict=True):
        starts.append(offset + np.arange(width) * size // width)
        offset += size
    return np.concatenate(starts)


def pool(matrix: np.ndarray, starts: np.ndarray, how: str) -> np.ndarray:
    """Reduce |matrix| to pixels: the largest or the root mean square of the entries that a pixel covers.

    >>> pool(np.array([[3.0, -4.0], [0.0, 0.0]]), np.array([0]), "max")
    array([[4.]])
    >>> pool(np.array([[3.0, -4.0], [0.0, 0.0]]), np.array([0, 1]), "rms")
    array([[3., 4.],
           [0., 0.]])
    """
    if how not in POOLINGS:
        raise InputError(f"heatmap: pooling={how!r} is not known; choose 'max' or 'rms'")
    if how == "max":
        return np.maximum.reduceat(np.maximum.reduceat(np.abs(matrix), starts, axis=1), starts, axis=0)
    top = float(np.abs(matrix).max()) or 1.0
    squares = np.add.reduceat(np.add.reduceat(np.square(matrix / top), starts, axis=1), starts, axis=0)
    count = np.maximum(np.diff(np.append(starts, matrix.shape[0])), 1)
    return top * np.sqrt(squares / np.outer(count, count))


def colour_range(values: np.ndarray, outside: float = 0.005, span: int = 8) -> tuple[float, float]:
    """Return the ends of a log scale for positive values: the largest one, and the one that a share of ``outside`` lie below.

    At most ``span`` decades; widened to whole decades where fewer than two powers of ten, the ticks, lie between.

    >>> colour_range(np.array([0.2, 3.0])), colour_range(np.array([1e-20, 3.0]), span=2)
    ((0.1, 10.0), (0.03, 3.0))
    """
    positive = values[values > 0]
    if not positive.size:
        return 0.1, 1.0
    high = float(positive.max())
    low = max(float(np.quantile(positive, outside)), high / 10.0**span)
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last > first:
        return low, high
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return 10.0**first, 10.0 ** max(last, first + 1)


def spread(centres: Sequence[float], lengths: Sequence[float], low: float, high: float) -> np.ndarray:
    """Move labels apart along a line as little as possible (least squares) and keep them inside.

    Args:
        centres: Where each label would stand, ascending.
        lengths: Room that each label needs.
        low: Beginning of the line.
        high: End of the line; the labels run past it evenly if they need more than there is.

    >>> spread([1.0, 1.0, 9.0], [2.0, 2.0, 2.0], 0.0, 10.0).tolist()
    [1.0, 3.0, 9.0]
    """
    room = np.asarray(lengths, dtype=float)
    offsets = np.cumsum(room) - room / 2  # label k stands at position_k + offset_k, positions ascending
    low, high = (low, high - room.sum()) if room.sum() <= high - low else ((low + high - room.sum()) / 2,) * 2
    groups: list[tuple[float, int]] = []  # mean position and number of labels, ascending: pool adjacent violators
    for wish in np.asarray(centres, dtype=float) - offsets:
        mean, count = float(wish), 1
        while groups and groups[-1][0] > mean:
            before, n = groups.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        groups.append((mean, count))
    return np.clip(np.repeat([mean for mean, _ in groups], [count for _, count in groups]), low, high) + offsets


def _letters(name: str) -> tuple[str, str] | None:
    """Return the letter and its index for one name without layer indices, or None."""
    direct = re.fullmatch(r"(?:.*\.)?([A-Za-z])_([A-Za-z0-9]+)", name)
    if direct:
        return direct.group(1), direct.group(2)
    if re.fullmatch(_POSITION + r"(\.weight)?", name):
        return "P", ""
    match = re.fullmatch(r"(.*?)[._](weight|bias)", name)
    if not match:
        return None
    owner, kind = match.groups()
    for patterns, letters in ((_NORM, (r"\gamma", r"\beta")), (_LINEAR, ("W", "b"))):
        for pattern, subscript in patterns:
            if re.fullmatch(rf"(.*\.)?({pattern})", owner):
                return letters[kind == "bias"], subscript
    return None
