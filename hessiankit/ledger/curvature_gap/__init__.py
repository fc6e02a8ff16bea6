"""Closing the Curvature Gap (Petrov et al.)."""

CHAPTERS = (
    "calculus",
    "matrix_norms",
    "setting",
    "layernorm",
    "layernorm_hessian",
    "block_jacobians",
    "block_hessian",
    "attention_curvature",
    "loss_hessian",
    "attention_loss",
)
