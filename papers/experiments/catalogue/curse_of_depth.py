"""Experiments of The Curse of Depth."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from papers.curse_of_depth.sizes import MODELS, Sizes
from papers.experiments.catalogue.preset import TINY, Experiment, Model, Printed, Recipe, at

EMBEDDING_STD = sqrt(2 / 5)
"""Standard deviation of the embedding in The Curse of Depth's code when its models were trained; since 2026 it has 0.02."""
LLAMA = Recipe(
    {
        **at("Sec. 5.1", norm="rmsnorm", activation="swiglu", optimizer="adamw"),
        **at(
            "code", rotary=True, tied=False, vocabulary=32_000, length=256, batch_size=512, weight_decay=0.0, clip=0.0, floor=0.1,
            betas=(0.9, 0.999), std=0.02, embedding_std=EMBEDDING_STD, warm_up=0.1, precision="bfloat16", block=(("eps", 1e-6),),
        ),
        **at("ours", initialisation="normal", windows=512, evaluations=20, log_spaced=False, every=0),
    },
    {
        "layers": 12, "d_model": 64, "heads": 4, "d_ff": 172, "length": 64, "norm": "rmsnorm", "activation": "swiglu",
        "rotary": True, "tied": False, "std": 0.02 * sqrt(768 / 64), "embedding_std": EMBEDDING_STD, "block": (("eps", 1e-6),),
        "initialisation": "normal", "lr": 2e-3, "floor": 0.1, "steps": 400, "batch_size": 8, "evaluations": 10, "windows": 64,
        "every": 20, "log_spaced": False, "measured": ("variance",), "batches": 2,
    },
    {**TINY, "layers": 4, "d_ff": 44, "std": 0.02 * sqrt(768 / 16)},
    "C4, T5-base tokens",
)  # fmt: skip
"""LLaMA as The Curse of Depth trains it. Small: a matrix multiplies norms as at the paper's width of 768."""
CURSE = {
    "Post-LN": {"placement": "post"}, "Pre-LN": {"placement": "pre"}, "LNS": {"placement": "lns"},
    "DeepNorm": {"placement": "deepnorm", "initialisation": "deepnorm"}, "Mix-LN": {"placement": "mix-ln"},
    "Pre-LN, scaled init": {"placement": "pre", "initialisation": "scaled"},
    "Pre-LN, depth-scaled init": {"placement": "pre", "initialisation": "depth-scaled"},
    "LNS, scaled init": {"placement": "lns", "initialisation": "scaled"},
    "LayerScale": {"placement": "layerscale"}, "SkipInit": {"placement": "skipinit"},
    "Admin": {"placement": "admin"}, "Group-LN": {"placement": "group-ln"}, "Sandwich-LN": {"placement": "sandwich"},
    "Before LN": {"placement": "lns-before-ln"}, "After Attn/FFN": {"placement": "lns-after-branch"},
    "After Residual": {"placement": "lns-after-residual"}, "LNS Only After Attn": {"placement": "lns-only-attention"},
    "LNS Only After FFN": {"placement": "lns-only-ffn"},
}  # fmt: skip
"""Methods of The Curse of Depth; the initialisation of the others is that of the recipe."""


def _curse(sizes: Sizes, steps: int, warm_up: float, lr: Printed, name: str, **options: Any) -> Model:
    released = at("code", **dict(zip(SIZES, sizes, strict=False)), steps=steps, warm_up=warm_up)
    return Model({**released, "lr": lr}, Printed(name, "Table 1"), within=0.04, **options)


SIZES = ("d_model", "d_ff", "heads", "layers")
CURSE_MODELS = {
    "130M": _curse(Sizes(768, 2048, 12, 12), 20_000, 0.1, Printed(1e-3, "Sec. 5.1"), "130M"),
    "250M": _curse(
        Sizes(768, 2560, 16, 24), 40_000, 0.1, Printed(1e-3, "Sec. 5.1"), "250M", small={"layers": 16}, tiny={"layers": 6}
    ),
    "350M": _curse(
        MODELS["LLaMA-350M"], 60_000, 0.1, Printed(1e-3, "Sec. 5.1; the code has 5e-4"), "350M",
        why="curse-of-depth/table1-llama-350m", small={"layers": 16, "d_model": 80, "d_ff": 216},
        tiny={"layers": 6, "d_model": 20, "d_ff": 56},
    ),
    "1B": _curse(
        MODELS["LLaMA-1B"], 100_000, 0.01, Printed(5e-4, "Sec. 5.1"), "1B", why="curse-of-depth/table1-llama-1b",
        small={"layers": 16, "d_model": 96, "d_ff": 256}, tiny={"layers": 6, "d_model": 24, "d_ff": 64},
    ),
}  # fmt: skip
"""Models by the names of Table 1; sizes and budgets are the released configurations."""
OTHERS = {
    "OLMo-1B": Model(
        {
            **at("OLMo-1B", **MODELS["OLMo-1B"]._asdict(), length=2048, batch_size=2048),
            **at("Table 3: 20B tokens", steps=4768), **at("OLMo-1B", lr=4e-4, warm_up=0.1),
        },
        Printed("1B", "Table 3"), "curse-of-depth/table3-olmo-1b", small={"layers": 8},
    ),
    "Qwen2.5-0.5B": Model(
        {
            **at("Qwen2.5-0.5B", d_model=896, d_ff=4864, heads=14, layers=24, vocabulary=151_936, tied=True, length=1024),
            **at("Qwen2.5-0.5B", block=(("attention_bias", True), ("eps", 1e-6), ("n_kv_heads", 2), ("rotary_theta", 1e6))),
            **at("Table 4: 6B tokens", steps=11_444), **at("ours", lr=5e-4),
        },
        Printed("0.5B", "Table 4"), within=0.02, small={"layers": 8, "tied": True}, tiny={"tied": True},
    ),
    "7B": Model(
        {
            **at("OLMo-7B", d_model=4096, d_ff=11_008, heads=32, layers=32, vocabulary=50_304, length=2048, batch_size=2160),
            **at("Sec. 5.3.1: 20B tokens", steps=4521), **at("OLMo-7B", lr=3e-4, warm_up=0.05),
        },
        Printed("7B", "Fig. 5"), within=0.02, small={"layers": 24},
    ),
}  # fmt: skip
"""Models of Tables 3 and 4 and of Figure 5: published configurations."""
VIT = Recipe(
    {
        **at("ViT-S", image=(224, 224, 3, 16), norm="layernorm", activation="gelu", length=196),
        **at("ImageNet-1K", vocabulary=1000), **at("ours", initialisation="normal", std=0.02, block=(("bias", True),)),
        **at("ours", batch_size=1024, lr=1e-3, weight_decay=0.05, windows=1024, log_spaced=False, every=1000),
        **at("ours", measured=("variance",)),
    },
    {
        "image": (8, 8, 1, 2), "vocabulary": 10, "text": "digits", "length": 16, "layers": 12, "d_model": 32, "heads": 4,
        "d_ff": 64, "steps": 150, "batch_size": 32, "lr": 1e-3, "weight_decay": 0.05, "std": None, "initialisation": "normal",
        "every": 10, "log_spaced": False, "measured": ("variance",), "windows": 64, "evaluations": 10, "batches": 2,
    },
    {"image": (8, 8, 1, 4), "length": 4, "layers": 3, "d_model": 8, "heads": 2, "d_ff": 16, "steps": 20, "every": 5},
    "ImageNet-1K as an .npz file",
)  # fmt: skip
VIT_S = Model(at("ViT-S", d_model=384, d_ff=1536, heads=6, layers=12, steps=100_000))


def _arms(*names: str) -> dict[str, Mapping[str, Any]]:
    return {name: CURSE[name] for name in names}


EXPERIMENTS: dict[str, Experiment] = {
    "curse-of-depth/table1": Experiment("Table 1", LLAMA, CURSE_MODELS, _arms("Post-LN", "DeepNorm", "Mix-LN", "Pre-LN", "LNS"),
        small={"steps": 100, "every": 0}, seeds=(0,)),
    "curse-of-depth/fig3": Experiment("Figures 3 and 6", LLAMA, {"130M": CURSE_MODELS["130M"]}, _arms("Post-LN", "Pre-LN", "LNS"),
        figure="curse_of_depth_2_3_6"),
    "curse-of-depth/fig4": Experiment("Figures 4 and 8", LLAMA, {"130M": CURSE_MODELS["130M"]},
        _arms("Pre-LN", "Pre-LN, scaled init", "LNS"), at("Sec. 5.4, Fig. 4", steps=10_000, every=100,
        measured=("variance",)), figure="curse_of_depth_4_8"),
    "curse-of-depth/fig5": Experiment("Figures 1 (right, 7B) and 5", LLAMA, {"7B": OTHERS["7B"]}, _arms("Pre-LN", "LNS"),
        small={"steps": 100, "every": 0}, seeds=(0,)),
    "curse-of-depth/table3": Experiment("Table 3", LLAMA, {"OLMo-1B": OTHERS["OLMo-1B"]},
        {"OLMo's init": {"placement": "pre", "initialisation": "olmo"}, "LNS": CURSE["LNS"]}, small={"steps": 200, "every": 0}),
    "curse-of-depth/table4": Experiment("Table 4", LLAMA, {"Qwen2.5-0.5B": OTHERS["Qwen2.5-0.5B"]}, _arms("Pre-LN", "LNS"),
        small={"steps": 200, "every": 0}),
    "curse-of-depth/table5": Experiment("Table 5 and Figure 7", VIT, {"ViT-S": VIT_S},
        {"Pre-LN": {"placement": "pre"}, "LNS after the norm": {"placement": "lns"},
         "LNS after attention and MLP": {"placement": "lns-after-branch"}}, figure="curse_of_depth_7"),
    "curse-of-depth/table6": Experiment("Table 6", LLAMA, {name: CURSE_MODELS[name] for name in ("130M", "250M")},
        _arms("Pre-LN", "LayerScale", "SkipInit", "Pre-LN, depth-scaled init", "Pre-LN, scaled init", "LNS", "LNS, scaled init"),
        small={"steps": 200, "every": 0}),
    "curse-of-depth/table7": Experiment("Table 7", LLAMA, {"130M": CURSE_MODELS["130M"]},
        _arms("Pre-LN", "Admin", "Group-LN", "Sandwich-LN", "Mix-LN", "LNS"), figure="curse_of_depth_7"),
    "curse-of-depth/table8": Experiment("Table 8", LLAMA, {"130M": CURSE_MODELS["130M"]},
        _arms("Pre-LN", "Before LN", "After Attn/FFN", "After Residual", "LNS Only After Attn", "LNS Only After FFN", "LNS"),
        small={"steps": 200, "every": 0}),
}  # fmt: skip
