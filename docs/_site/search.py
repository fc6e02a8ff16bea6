"""What the search finds first: pages that answer a question before pages that mention its words; source files not at all."""

from __future__ import annotations

from typing import Any

BOOST = {"reference/hessians.md": 4, "reference/checks.md": 4, "quickstart.md": 2}
WORDS = {
    "quickstart.md": ("Hessian", "trace", "block"),
    "howto/spectrum.md": ("top eigenvalues", "Lanczos", "spectral density", "loss landscape", "loss surface"),
    "howto/large_models.md": ("Hessian-vector product", "HVP", "memory", "billion", "conjugate gradients", "solve"),
    "howto/optimiser_curvature.md": ("edge of stability", "AdamW", "preconditioned sharpness", "learning rate threshold"),
    "howto/double_backward.md": ("flash attention double backward", "scaled_dot_product_attention", "gradient penalty"),
    "howto/influence.md": ("influence functions", "data attribution"),
    "howto/hugging_face.md": ("LoRA", "transformers", "language model"),
    "concepts/wrong_second_derivatives.md": ("second derivative wrong", "torch.func.hessian", "not symmetric"),
    "approximations.md": ("K-FAC", "KFAC", "EKFAC", "Shampoo", "Gauss-Newton", "Fisher"),
    "distributed.md": ("FSDP", "torchrun", "DistributedDataParallel", "several GPUs"),
    "sharpness.md": ("sharpness", "block type"),
    "blockwise_lr.md": ("layer-wise learning rate", "parameter groups"),
    "bounds.md": ("Lipschitz", "spectral norm"),
    "derivations.md": ("LayerNorm", "LaTeX", "SymPy", "Jacobian", "vec_r"),
}
"""Page -> words of the field whose answer it is; a word there counts for more than any title."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Set a page's weight and its words."""
    where = page.file.src_uri
    if where.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    elif where in BOOST:
        page.meta["search"] = {"boost": BOOST[where]}
    if where in WORDS:
        page.meta["tags"] = list(WORDS[where])
