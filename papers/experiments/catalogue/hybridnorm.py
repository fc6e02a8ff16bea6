"""Experiments of HybridNorm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from papers.experiments.catalogue.preset import TINY, Experiment, Model, Printed, Recipe, at
from papers.hybridnorm.tables import TABLE_6

HYBRID = Recipe(
    {
        **at("Table 7", optimizer="adamw", lr=3e-4, floor=0.1, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, batch_size=1024),
        **at("Table 7", activation="swiglu", std=None, initialisation="megatron"),
        **at("Table 6", vocabulary=100_278, tied=True, length=4096), **at("Sec. 3", norm="rmsnorm"), **at("App. B.2",
        rotary=True),
        **at("ours", windows=512, log_spaced=False, every=0, precision="bfloat16"),
    },
    {
        "layers": 8, "d_model": 64, "heads": 4, "d_ff": 172, "length": 64, "norm": "rmsnorm", "activation": "swiglu",
        "rotary": True, "std": None, "block": (("n_kv_heads", 1),), "lr": 3e-3, "floor": 0.1, "steps": 240, "batch_size": 8,
        "evaluations": 10, "windows": 64, "every": 0, "log_spaced": False, "measured": (), "batches": 1,
    },
    {**TINY, "layers": 4, "d_ff": 44},
    "OLMoE-mix-0924, OLMo tokens",
)  # fmt: skip


def _dense(name: str, billions: float, place: str, **options: Any) -> Model:
    d, d_ff, heads, kv, layers = TABLE_6[name]
    steps = round(billions * 1e9 / (1024 * 4096))
    numbers = at("Table 6", d_model=d, d_ff=d_ff, heads=heads, layers=layers)
    numbers |= at("Table 6; Table 7, RoPE theta", block=(("n_kv_heads", kv), ("rotary_theta", 5e5)))
    numbers |= at(place, steps=steps) | at("Table 7, warm-up tokens", warm_up=8.388608 / billions)
    return Model(numbers, Printed({"1.2B": "1.27B"}.get(name, name), "Table 6; Sec. 4.1"), **options)


MOE = Model(
    {
        **at("Table 6", d_model=2048, d_ff=1024, heads=16, layers=16, vocabulary=50_280, tied=False, experts=(64, 8)),
        **at("Table 7", lr=4e-4, floor=0.125, block=(("n_kv_heads", 16), ("rotary_theta", 1e4)), warm_up=10_485_760_000 / 500e9),
        **at("Table 2: 500B tokens", steps=119_209),
    },
    Printed("6.9B", "Sec. 4.1"), small={"experts": (8, 2), "d_ff": 44, "tied": False},
    tiny={"experts": (4, 2), "d_ff": 12, "tied": False},
)  # fmt: skip
HYBRID_ARMS = {
    "Pre-Norm": {"placement": "pre"},
    "HybridNorm": {"placement": "hybridnorm"},
    "HybridNorm*": {"placement": "hybridnorm*"},
}
FIRST_BLOCKS = {
    "HybridNorm": "hybridnorm", "HybridNorm*": "hybridnorm*", "First-QKV-Pre": "first-qkv-pre",
    "EmbedNorm": "embednorm-hybridnorm",
}  # fmt: skip
FLOWS = {
    "Pre-Norm, normal": ("pre", "normal"), "Pre-Norm, Megatron": ("pre", "megatron"),
    "Post-Norm, shifted": ("post-shifted", "megatron"), "Post-Norm, Eqs. 3-4": ("post", "megatron"),
    "HybridNorm": ("hybridnorm", "megatron"), "HybridNorm*": ("hybridnorm*", "megatron"),
}  # fmt: skip
"""Placements and initialisations of Figure 5; HybridNorm's App. E has its norms of Post-Norm in front."""
DENSE_550 = {"550M": _dense("550M", 400, "Tables 3 to 5: 400B tokens")}
EXPERIMENTS: dict[str, Experiment] = {
    "hybridnorm/fig1": Experiment("Figures 1 and 7", HYBRID, {"1.2B": _dense("1.2B", 1000,
    "Fig. 1: 1T tokens")},
        HYBRID_ARMS),
    "hybridnorm/fig3": Experiment("Figures 3 and 8", HYBRID, {"MoE-1B-7B": MOE},
        {name: HYBRID_ARMS[name] for name in ("Pre-Norm", "HybridNorm")}),
    "hybridnorm/table3": Experiment("Table 3", HYBRID, DENSE_550,
        {f"{name}, {scheme}": {"placement": placement, "initialisation": scheme}
         for name, placement in (("Pre-Norm", "pre"), ("HybridNorm", "hybridnorm"))
         for scheme in ("normal", "depth-scaled", "megatron")}, figure="hybridnorm_table_3", seeds=(0, 1, 2, 3)),
    "hybridnorm/table4": Experiment("Table 4", HYBRID, DENSE_550,
        {name: {"placement": name.lower().removesuffix("-norm")} for name in ("QKVC-Post", "QKC-Post", "QK-Post", "KV-Post",
        "KC-Post", "Pre-QKV-Post", "Pre-QKV-Pre", "Pre-QK-Pre", "QKV-Pre", "Post-Norm", "Pre-Norm", "Mix-LN", "Post-Pre",
        "Pre-Post", "HybridNorm", "HybridNorm*",)}, figure="hybridnorm_tables_4_5"),
    "hybridnorm/table5": Experiment("Table 5", HYBRID,
        {**{name: replace(one, small={"layers": 16}) for name, one in DENSE_550.items()},
         "543M": _dense("543M", 400, "Table 5: 400B tokens", small={"layers": 29}, tiny={"layers": 6})},
        {"Post-Norm": {"placement": "post"}, **HYBRID_ARMS}, small={"steps": 100, "every": 100, "measured": ("gradient",)},
        figure="hybridnorm_tables_4_5"),
    "hybridnorm/fig4": Experiment("Figure 4", HYBRID, DENSE_550, {name: {"placement": one} for name, one in FIRST_BLOCKS.items()},
        figure="hybridnorm_4_5", seeds=(0, 1, 2, 3)),
    "hybridnorm/fig5": Experiment("Figure 5", HYBRID, DENSE_550,
        {name: {"placement": placement, "initialisation": scheme} for name, (placement, scheme) in FLOWS.items()},
        at("Fig. 5", steps=100, every=100, measured=("gradient",)) | at("ours", warm_up=0.9),
        {"layers": 16, "steps": 100, "every": 100, "measured": ("gradient",)}, "hybridnorm_4_5"),
    "hybridnorm/fig6": Experiment("Figure 6", HYBRID,
        {"151M": _dense("151M", 200, "Sec. 4.6: 200B tokens", small={"layers": 4, "d_model": 32, "d_ff": 84},
        tiny={"d_model": 8}),
         "285M": _dense("285M", 200, "Sec. 4.6: 200B tokens", small={"layers": 6, "d_model": 48, "d_ff": 128}),
         "550M": _dense("550M", 300, "Sec. 4.6: 300B tokens"),
         "1.2B": _dense("1.2B", 1000, "Sec. 4.6: 1T tokens", small={"d_model": 96, "d_ff": 256}, tiny={"d_model": 24})},
        {name: HYBRID_ARMS[name] for name in ("Pre-Norm", "HybridNorm")}),
}  # fmt: skip
