"""Experiments of Closing the Curvature Gap."""

from __future__ import annotations

from papers.experiments.catalogue.preset import Experiment, Model, Recipe, at

VISION = Recipe(
    {
        **at("Fig. 2", placement="post"), **at("Table 1", heads=1),
        **at("ours: neither optimizer nor rate is printed", optimizer="adamw", lr=3e-3, weight_decay=0.0, clip=0.0,
        batch_size=128),
        **at("ours", activation="relu", block=(("bias", True),), initialisation="normal", std=None, warm_up=0.0, floor=1.0),
        **at("ours", windows=1024, log_spaced=False, every=100, measured=("norms",)),
    },
    {
        "placement": "post", "heads": 1, "lr": 3e-3, "weight_decay": 0.0, "clip": 0.0, "batch_size": 128, "activation": "relu",
        "block": (("bias", True),), "initialisation": "normal", "std": None, "warm_up": 0.0, "floor": 1.0, "windows": 128,
        "log_spaced": False, "every": 100, "measured": ("norms",), "text": "digits", "vocabulary": 10,
    },
    {"d_model": 8, "d_ff": 16, "steps": 30, "every": 10, "batch_size": 32, "windows": 32},
    "images and labels as an .npz file",
)  # fmt: skip
IMAGES = {
    "MNIST": Model(
        {
            **at("Table 1", d_model=16, d_ff=64, layers=1), **at("MNIST; Table 1, patches of 4", image=(28, 28, 1, 4),
            length=49),
            **at("MNIST", vocabulary=10), **at("App. A.1", steps=1000), **at("ours", kept=tuple(range(100, 1000, 100))),
        },
        small={"image": (8, 8, 1, 2), "length": 16, "layers": 1, "d_model": 16, "d_ff": 64, "steps": 1000,
               "kept": tuple(range(100, 1000, 100))},
        tiny={"image": (8, 8, 1, 4), "length": 4, "kept": (10, 20)},
    ),
    "CIFAR-100": Model(
        {
            **at("Table 1", d_model=128, d_ff=512, layers=8), **at("CIFAR-100; patches of 4", image=(32, 32, 3, 4), length=64),
            **at("CIFAR-100", vocabulary=100), **at("ours: accuracy above 50 %, Sec. 5", steps=20_000),
        },
        small={"image": (8, 8, 1, 2), "length": 16, "layers": 8, "d_model": 16, "d_ff": 64, "steps": 500},
        tiny={"image": (8, 8, 1, 4), "length": 4, "layers": 2},
    ),
}  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {
    "curvature-gap/mnist": Experiment("Figures 3 to 5 and 7 to 11", VISION, {"MNIST": IMAGES["MNIST"]}, {"AdamW": {}},
        figure="curvature_gap_5", seeds=(0,)),
    "curvature-gap/cifar": Experiment("Figures 6 and 12", VISION, {"CIFAR-100": IMAGES["CIFAR-100"]}, {"AdamW": {}},
        figure="curvature_gap_6_12", seeds=(0,)),
}  # fmt: skip
