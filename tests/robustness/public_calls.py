"""What the fuzz calls: every public function with arguments that are right, and how its messages name it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hessiankit as hk
from hessiankit import optim
from hessiankit import partition as parts
from hessiankit.diagnostics import depth, monitoring
from hessiankit.diagnostics.monitoring import MonitorLog
from hessiankit.verify import testing


@dataclass(frozen=True)
class Call:
    """A public callable, arguments it takes, and what its messages begin with.

    Attributes:
        function: The callable.
        right: Makes arguments that it accepts, new ones each time; a module among them is compared before and after.
        names: What a message may begin with.
        spared: Argument -> values that are right but slow, or that another test has.
    """

    function: Callable[..., Any]
    right: Callable[[], dict[str, Any]]
    names: tuple[str, ...]
    spared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def block() -> nn.Module:
    torch.manual_seed(0)
    return hk.TransformerBlock(4, 5, d_k=2).double()


def language_model() -> nn.Module:
    return hk.Transformer(7, 4, 5, 2, max_len=6, seed=0).double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens(*shape: int, below: int = 7) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def on_block(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"module": block(), "inputs": numbers(2, 3, 4), "target": numbers(2, 3, 4), "loss": "mse", **more}


def _without_loss(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"module": block(), "inputs": numbers(2, 3, 4), **more}


def on_language(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": language_model(), "data": tokens(2, 4), "target": tokens(2, 4), **more}


def _renamed(arguments: Callable[[], dict[str, Any]], **names: str) -> Callable[[], dict[str, Any]]:
    return lambda: {names.get(key, key): value for key, value in arguments().items()}


def _scheduled() -> dict[str, Any]:
    groups = optim.blockwise_lr(language_model(), 1e-3)
    return {
        "optimizer": torch.optim.AdamW(groups),
        "warmup": 2,
        "steps": 10,
        "kind": "cosine",
        "ramp": "direct",
        "floor": "scaled",
    }


def _measured() -> dict[str, Any]:
    return {"sharpness": hk.sharpness(**on_language(draws=2)()), "power": 0.5, "cap": 4.0, "base": "Norm"}


FOLDER = tempfile.TemporaryDirectory()  # gone at the end of the process


def _path() -> Path:
    """A file in a folder of its own, which is not there yet."""
    return Path(tempfile.mkdtemp(dir=FOLDER.name)) / "run.jsonl"


def _written() -> Path:
    """A file of a monitor, with one measurement."""
    path = _path()
    hk.Monitor(**_monitored(path)).step(0)
    return path


def _loss_of(self: MonitorLog) -> Any:
    return self.series("loss")


def _monitored(path: Path | None = None) -> dict[str, Any]:
    return {
        **on_language()(), "path": path or _path(), "every": 1, "log_spaced": False, "sharpness": False,
        "norms": True, "eigenvalue": False, "depth": (), "spectrum": 0, "approximations": (), "hessian": False, "share": None, "draws": 2, "seed": 0, "per": "token", "micro_batch": None, "parts": None,
        "eigenvalue_route": "auto", "eigenvalue_tol": 1e-3, "eigenvalue_products": 5, "warm_starts": True, "optimizer": None, "preconditioned": True, "critical": True, "on_error": "raise",
    }  # fmt: skip


def _stepped() -> dict[str, Any]:
    arguments = on_block(params=None, weights=None, reduction=None, by=None, passes=3)()
    return {**arguments, "optimizer": torch.optim.SGD(arguments["module"].parameters(), lr=0.1)}


def _angles() -> dict[str, Any]:
    return {"x": numbers(3, 4), "y": numbers(3, 4)}


def _transformer() -> dict[str, Any]:
    return {
        "vocab_size": 7, "d_model": 4, "d_ff": 5, "n_layers": 1, "n_heads": 2, "placement": "pre", "max_len": 3, "tied": True,
        "final_norm": None, "head": "token", "n_classes": None, "initialisation": "normal", "seed": 0, **_block_options(),
    }  # fmt: skip


def _block_options() -> dict[str, Any]:
    return {"norm": "layernorm", "activation": "gelu", "bias": True, "causal": True, "rotary": False, "eps": 1e-5, "affine": True}


def _one_block() -> dict[str, Any]:
    return {
        "d_model": 4, "d_ff": 5, "n_heads": 2, "placement": "post", **_block_options(), "n_kv_heads": 1, "d_k": 2, "d_v": 2,
        "attention_bias": False, "output_projection": True, "rotary_theta": 1e4, "norm_scope": None, "groups": 2, "layer": 1,
        "n_layers": 1, "alpha": 0.25, "factor": None, "scale_init": None,
    }  # fmt: skip


def _vision() -> dict[str, Any]:
    return {
        "patch_dim": 4,
        "seq_len": 3,
        "n_classes": 3,
        "d_model": 4,
        "d_ff": 5,
        "n_blocks": 1,
        "final_norm": True,
        **_block_options(),
    }


PATIENT = ("progress", "weights", "function")
"""Arguments that are functions of the user's own."""
PARTS_OF_MODELS = (
    "TransformerBlock",
    "Attention",
    "FeedForward",
    "TokenEmbedding",
    "PatchEmbedding",
    "ClassHead",
    "MeanPoolHead",
    "TokenHead",
    "initialise",
)
"""A constructor's message may begin with the part that it could not build."""
COUNTS = ("huge",)
"""Values that ask for more work, not for something impossible."""

SIZE = sum(p.numel() for p in block().parameters())

CALLS = {
    "hessian": Call(
        hk.hessian,
        on_block(params=None, batch_size=None, progress=None, weights=None, reduction=None, lazy=False, out=None, overwrite=False, resume=False),
        ("hessian",),
        {"out": ("text", "number", "huge")},
    ),
    "hessian(dry_run)": Call(hk.hessian, on_block(dry_run=True, batch_size=None), ("hessian",)),
    "hessian_function": Call(hk.hessian_function, on_block(params=None, batch_size=None), ("hessian_function",)),
    "hessian_operator": Call(
        hk.hessian_operator,
        _renamed(on_block(params=None, kind="hessian", block_size=None, weights=None, reduction=None, progress=None), inputs="data"),
        ("hessian_operator",),
    ),
    "hessian_diagonal": Call(
        hk.hessian_diagonal,
        on_block(
            params=None, batch_size=None, weights=None, reduction=None, kind="hessian", progress=None, method="exact",
            max_products=None,
        ),
        ("hessian_diagonal",),
    ),
    "scalar_estimates": Call(
        hk.scalar_estimates,
        lambda: {
            "operator": hk.hessian_operator(block(), numbers(2, 3, 4), numbers(2, 3, 4)), "products": 10, "level": 0.9, "seed": 0,
        },
        ("scalar_estimates",),
    ),
    "frobenius_norms": Call(
        hk.frobenius_norms,
        on_block(params=None, batch_size=None, weights=None, reduction=None, kind="hessian", panel_bytes=None, progress=None),
        ("frobenius_norms",),
    ),
    "scaled_dot_product_attention": Call(
        hk.scaled_dot_product_attention,
        lambda: {
            "query": numbers(2, 3, 4), "key": numbers(2, 5, 4), "value": numbers(2, 5, 4), "attn_mask": None, "dropout_p": 0.0,
            "is_causal": False, "scale": None, "enable_gqa": False,
        },
        ("scaled_dot_product_attention",),
        {"query": ("NaN",), "key": ("NaN",), "value": ("NaN", "no entries")},  # as torch computes them
    ),
    "linear_cross_entropy": Call(
        hk.linear_cross_entropy,
        lambda: {
            "hidden": numbers(2, 3, 4), "weight": numbers(7, 4), "labels": tokens(2, 3), "bias": None, "ignore_index": -100,
            "label_smoothing": 0.0, "reduction": "mean", "shift": False,
        },
        ("linear_cross_entropy",),
        {"hidden": ("NaN",), "weight": ("NaN",)},
    ),
    "twice_differentiable_attention": Call(hk.twice_differentiable_attention, dict, ("twice_differentiable_attention",)),
    "check": Call(
        hk.check,
        _renamed(
            on_block(
                against=("reverse-over-reverse", "jvp(grad)"), rtol=None, seed=0, dtype=torch.float64, directions=1, formulas=False,
                exact=False, params=("attention.W_Q",), progress=None,
            ),
            module="block_or_module",
        ),
        ("check",),
    ),
    "assert_hessian_matches": Call(
        testing.assert_hessian_matches,
        on_block(against=("reverse-over-reverse", "jvp(grad)"), directions=1, formulas=False, params=("attention.W_Q",)),
        ("check", "assert_hessian_matches"),
        {"against": ("list",)},  # an AssertionError, as documented: fewer than two references
    ),
    "bounds": Call(hk.bounds, _renamed(on_block(), module="block"), ("bounds",)),
    "derive": Call(
        hk.derive,
        lambda: {"what": block(), "wrt": ("query",), "inputs": None, "target": None, "loss": None, "length": 2, "seed": 0},
        ("derive",),
        {"length": COUNTS},
    ),
    "spectrum": Call(
        hk.spectrum,
        on_block(k=2, bottom=1, params=None, kind="ggn", preconditioner=None, directions=2, steps=4, by=None, method="lanczos", tol=1e-3, max_products=40,
                 seed=0, progress=False, weights=None, reduction=None),
        ("spectrum",),
        {"directions": COUNTS, "steps": COUNTS, "max_products": COUNTS},
    ),
    "critical_sharpness": Call(
        hk.critical_sharpness,
        _stepped,
        ("critical_sharpness", "spectrum"),
        {"passes": COUNTS},
    ),
    "loss_slices": Call(
        hk.loss_slices,
        on_block(
            along=numbers(SIZE, 1), params=None, weights=None, reduction=None, normalise="none", span=(-0.1, 0.1), points=3, tolerance=0.1,
        ),
        ("loss_slices",),
        {"points": COUNTS},
    ),
    "approximations": Call(
        hk.approximations,
        on_block(
            against="ggn", of=("diagonal", "kfac"), params=None, damping=0.1, rank=2, minibatch=1, method="dense", products=6,
            batch_size=None, weights=None, reduction=None, seed=0, draws=1,
        ),
        ("approximations",),
        {"products": COUNTS, "draws": COUNTS, "rank": COUNTS, "minibatch": COUNTS},
    ),
    "jacobian_operator": Call(hk.jacobian_operator, _without_loss(params=None), ("jacobian_operator",)),
    "trace_module": Call(
        hk.trace_module,
        lambda: {"function": lambda p, x: (x @ p["W"]).sum(), "parameters": {"W": numbers(2, 2)}, "inputs": (numbers(3, 2),)},
        ("trace", "trace_module"),
    ),
    "block_types": Call(
        hk.block_types,
        lambda: {"model": language_model(), "inputs": None, "overrides": None, "biases": "layer", "final_norm": "Norm", "tied": "Emb"},
        ("block_types", "model_parts"),
    ),
    "model_parts": Call(parts.model_parts, lambda: {"model": language_model(), "inputs": None}, ("model_parts",)),
    "named_slices": Call(hk.named_slices, lambda: {"module": language_model(), "heads": True}, ("named_slices",)),
    "sharpness": Call(
        hk.sharpness,
        on_language(
            loss="cross_entropy", draws=2, seed=0, per="token", kind="fisher-mc", micro_batch=None, parts=None, confidence=0.95,
            histograms=False, numbers=None, shift=None, progress=None,
        ),
        ("sharpness",),
        {"draws": COUNTS},
    ),
    "depth_diagnostics": Call(
        hk.depth_diagnostics,
        on_language(
            blocks=None, what=("variance", "angles", "drop", "gradient"), tokens="all", loss="cross_entropy",
            curvature="auto", draws=2, exact_below=256, tol=1e-2, products=4, seed=0, micro_batch=None, progress=None,
        ),
        ("depth_diagnostics",),
        {"draws": COUNTS, "products": COUNTS},
    ),
    "depth_diagnostics(curvature)": Call(
        hk.depth_diagnostics,
        on_language(what=("jacobian", "hessian"), curvature="auto", draws=2, exact_below=4, tol=1e-1, products=3, seed=0),
        ("depth_diagnostics",),
        {"draws": COUNTS, "products": COUNTS},
    ),
    "angular_distance": Call(depth.angular_distance, _angles, ("angular_distance",)),
    "blockwise_lr": Call(
        hk.blockwise_lr,
        lambda: {
            "model": language_model(), "lr": 1e-3, "ratios": "paper", "optimizer": "adamw", "muon_lr": None, "weight_decay": 0.1,
            "decay": "matrices", "couple_decay": True, "head_ratio": None, "sharpness": None, "power": 0.5, "cap": 4.0, "parts": None,
            "guard": "raise",
        },
        ("blockwise_lr",),
    ),
    "blockwise_schedule": Call(hk.blockwise_schedule, _scheduled, ("blockwise_schedule",)),
    "check_groups": Call(optim.check_groups, lambda: {"optimizer": _scheduled()["optimizer"]}, ("check_groups",)),
    "measured_ratios": Call(optim.measured_ratios, _measured, ("measured_ratios",)),
    "Ratio": Call(optim.Ratio, lambda: {"value": 2.0, "low": 1.0, "high": 3.0}, ("Ratio",)),
    "growth_laws": Call(depth.growth_laws, lambda: {"variance": (1.0, 2.0, 3.0, 4.0)}, ("growth_laws",)),
    "Monitor": Call(hk.Monitor, _monitored, ("monitor", "Monitor", "sharpness", "depth_diagnostics", "model_parts"), {"path": ("text",)}),
    "MonitorLog.read": Call(monitoring.MonitorLog.read, lambda: {"path": _written()}, ("monitor",)),
    "MonitorLog.plot": Call(
        lambda **options: monitoring.MonitorLog.read(_written()).plot(**options), lambda: {"path": None, "title": None}, ("MonitorLog.plot",),
        {"path": ("text",)},
    ),
    "MonitorLog.series": Call(_loss_of, lambda: {"self": monitoring.MonitorLog.read(_written())}, ("MonitorLog",), {"self": ("*",)}),
    "Transformer": Call(hk.Transformer, _transformer, ("Transformer", *PARTS_OF_MODELS), {"n_layers": COUNTS}),
    "TransformerBlock": Call(hk.TransformerBlock, _one_block, PARTS_OF_MODELS),
    "VisionTransformer": Call(hk.VisionTransformer, _vision, ("VisionTransformer", *PARTS_OF_MODELS), {"n_blocks": COUNTS}),
}  # fmt: skip
