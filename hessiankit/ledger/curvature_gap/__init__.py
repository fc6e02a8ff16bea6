"""Closing the Curvature Gap: Full Transformer Hessians (Petrov et al.)."""

CHAPTERS = (
    "setting",
    "calculus",
    "matrix_norms",
    "attention_objects",
    "attention_curvature",
    "attention_loss",
    "attention_bounds",
    "layernorm",
    "layernorm_hessian",
    "block_jacobians",
    "block_hessian",
    "block_symmetry",
    "loss_hessian",
    "norm_bounds",
    "block_bound_steps",
    "block_bounds",
    "convergence",
    "experiments",
    "completions",
)
