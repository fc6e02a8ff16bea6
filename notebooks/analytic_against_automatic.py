# %% [markdown]
# # The Hessian of a transformer block: analytic against automatic
#
# One post-norm block, Y = LN(X + F(X)) and Z = LN(Y + FFN(Y)), and the squared error
# loss = ||Z - T||_F^2 / (L d_V). Its Hessian in all parameters is computed
#
# 1. analytically, by `hessiankit.hessian`: one closed form for each operation, no automatic differentiation;
# 2. analytically, by the vec_r formulas of the paper *Closing the Curvature Gap*, in their corrected form;
# 3. automatically, by reverse mode through the graph of reverse mode;
# 4. automatically, by `torch.func.hessian`, which is wrong here.
#
# Weights multiply from the right, and vec_r stacks the rows of a matrix, so that the entries of a weight `W` stand in the
# Hessian in the order of `W.reshape(-1)`.
#
# Run it as a script (`python notebooks/analytic_against_automatic.py [folder for the pictures]`), or open it in Jupyter
# with jupytext.

# %%
import sys
import tempfile
from pathlib import Path

import torch
from torch.func import functional_call

import hessiankit
from derivations.matrix import Identity, kron
from derivations.transformer import PostNormBlockAt
from hessiankit.drawing.plots import heatmap

script = "ipykernel" not in sys.modules
folder = Path(sys.argv[1]) if script and len(sys.argv) > 1 else Path(tempfile.mkdtemp())

# %% [markdown]
# ## The block
#
# All sizes differ, so that a swapped index cannot go unnoticed. The gains and shifts of the norms are drawn too: at their
# initial values, 1 and 0, some errors of a formula are invisible.

# %%
L, d_V, d_K, d_ff = 3, 4, 2, 6

torch.manual_seed(0)
block = hessiankit.TransformerBlock(d_V, d_ff, d_k=d_K).double()
with torch.no_grad():
    for norm in (block.norm_1, block.norm_2):
        norm.weight += 0.5 * torch.randn(d_V)
        norm.bias += 0.5 * torch.randn(d_V)
X, T = torch.randn(2, L, d_V, dtype=torch.float64)

# %% [markdown]
# ## 1. Analytic, as you would call it

# %%
H = hessiankit.hessian(block, X, T, loss="mse")
print(H)

# %% [markdown]
# ## 2. Analytic, as the paper writes it
#
# With S = Y + FFN(Y), B_i = dS/dW_i and xi_ij = dB_i/dW_j, each block of the Hessian is
#
# $$H^{(i,j)} = \frac{2}{L d_V}\left[J_i^\top J_j +
#   \left(\operatorname{vec}_r(Z-T)^\top\otimes I_{n_i}\right) H_{tr}^{(i,j)}\right], \qquad
#   H_{tr}^{(i,j)} = \left(J_Z\otimes I_{n_i}\right)\xi_{ij} + \left(I_{L d_V}\otimes B_i^\top\right) H_Z B_j$$
#
# with $J_i = J_Z B_i$ for the weights (Eq. 7 and 12; the print leaves the factor out of the second term).
# Here it is for queries and values, letter by letter:

# %%
weights = {name.rpartition(".")[2]: p.detach() for name, p in block.named_parameters() if "norm" not in name}
gains = {f"gamma_{k}": getattr(block, f"norm_{k}").weight.detach() for k in (1, 2)}
shifts = {f"beta_{k}": getattr(block, f"norm_{k}").bias.detach() for k in (1, 2)}
point = PostNormBlockAt(X, **weights, **gains, **shifts, eps=block.norm_1.eps)

n_Q = block.attention.W_Q.numel()
J_Z, H_Z, B_Q, B_V = point.J_Z, point.H_Z, point.B("Q"), point.B("V")
H_tr = kron(J_Z, Identity(n_Q)) @ point.xi("Q", "V") + kron(Identity(L * d_V), B_Q.T) @ H_Z @ B_V

residual = (point.Z - T).reshape(1, -1)
outer = 2 / (L * d_V) * (J_Z @ B_Q).dense().T @ (J_Z @ B_V).dense()
functional = 2 / (L * d_V) * torch.kron(residual, torch.eye(n_Q)) @ H_tr.dense()

H_QV = H.block("attention.W_Q", "attention.W_V")
print(f"H_tr^(Q,V): {H_tr.shape[0]} x {H_tr.shape[1]}; H^(Q,V): {n_Q} x {d_V**2}, largest entry {H_QV.abs().max():.4f}")
print(f"  outer-product part {outer.abs().max():.4f}, functional part {functional.abs().max():.4f}")
print(f"  formula minus hessiankit.hessian: {(outer + functional - H_QV).abs().max():.1e}")

# %% [markdown]
# The formula is an expression, not an array, until `.dense()` is called. Read as LaTeX, the second derivative of
# attention in W_Q and W_V (Lemma 2), which xi_QV contains, is

# %%
print(point.Phi("Q", "V").latex())

# %% [markdown]
# `PostNormBlockAt.loss_hessian` does the same for every pair of parameters. The whole matrix:

# %%
letters = {"norm_1.weight": "gamma_1", "norm_1.bias": "beta_1", "norm_2.weight": "gamma_2", "norm_2.bias": "beta_2"}
letters = {name: letters.get(name, name.rpartition(".")[2]) for name in H.names}
formulas = torch.cat(
    [torch.cat([point.loss_hessian(T, letters[i], letters[j]).total.dense() for j in H.names], dim=1) for i in H.names]
)

# %% [markdown]
# ## 3. Automatic: reverse over reverse
#
# The loss as a function of one vector of all parameters, its gradient, and the gradient of each entry of the gradient.

# %%
theta = torch.cat([p.detach().reshape(-1) for p in block.parameters()])


def unpack(vector):
    parts = vector.split([p.numel() for p in block.parameters()])
    return {name: part.reshape(p.shape) for (name, p), part in zip(block.named_parameters(), parts, strict=True)}


def loss(vector):
    return (functional_call(block, unpack(vector), (X,)) - T).square().mean()


def reverse_over_reverse(function, at):
    at = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(at), at, create_graph=True)
    return torch.stack([torch.autograd.grad(entry, at, retain_graph=True)[0] for entry in gradient])


empirical = reverse_over_reverse(loss, theta)

# %% [markdown]
# ## 4. Automatic: `torch.func.hessian`
#
# It is forward mode over reverse mode, `jacfwd(jacrev)`. Through `layer_norm` with a gain, torch drops from the derivative
# of the gain's gradient the dependence of mean and variance on what comes in. The same call on the same block with the
# norm written out in elementary operations is right, so the fault lies there and nowhere else.

# %%
func_hessian = torch.func.hessian(loss)(theta)


def layer_norm(x, gain, shift, eps):
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + shift


def loss_by_hand(vector):
    p = unpack(vector)
    norms = [(p[f"norm_{k}.weight"], p[f"norm_{k}.bias"], block.norm_1.eps) for k in (1, 2)]
    Q, K, V = (X @ p[f"attention.W_{letter}"] for letter in "QKV")
    Y = layer_norm(X + torch.softmax(Q @ K.T / d_K**0.5, dim=-1) @ V, *norms[0])
    Z = layer_norm(Y + torch.relu(Y @ p["feedforward.W_1"]) @ p["feedforward.W_2"], *norms[1])
    return (Z - T).square().mean()


func_hessian_by_hand = torch.func.hessian(loss_by_hand)(theta)

# %% [markdown]
# ## The numbers
#
# Each block pair is compared on its own: the largest difference from `hessiankit.hessian` relative to the largest entry
# of that pair, so that no small block hides behind a large one.

# %%


def worst(other):
    """Return the largest error of all block pairs, and the pair where it occurs."""
    errors = {
        (i, j): float((other[H.slices[i], H.slices[j]] - H.block(i, j)).abs().max() / H.block(i, j).abs().max())
        for i in H.names
        for j in H.names
    }
    pair = max(errors, key=errors.get)
    return errors[pair], pair


routes = {
    "vec_r formulas": formulas,
    "reverse over reverse": empirical,
    "torch.func.hessian": func_hessian,
    "torch.func.hessian, norm by hand": func_hessian_by_hand,
}
print(f"\n{'against hessiankit.hessian':34}{'error':>9}{'|H - H^T|':>11}{'eigenvalues from':>19}{'to':>13}")
for name, matrix in routes.items():
    error, pair = worst(matrix)
    asymmetry = float((matrix - matrix.T).abs().max() / matrix.abs().max())
    eigenvalues = torch.linalg.eigvals(matrix).real
    where = f"  in {pair[0]} x {pair[1]}" if error > 1e-10 else ""
    print(f"{name:34}{error:9.1e}{asymmetry:11.1e}{eigenvalues.min():19.9f}{eigenvalues.max():13.9f}{where}")

for name in ("vec_r formulas", "reverse over reverse", "torch.func.hessian, norm by hand"):
    assert worst(routes[name])[0] < 1e-10, f"{name} disagrees with hessiankit.hessian"
assert H.asymmetry < 1e-12
wrong = worst(func_hessian)[0] > 1e-10
print(f"torch.func.hessian is {'WRONG' if wrong else 'right'} in torch {torch.__version__}; the others agree")

# %% [markdown]
# ## The pictures
#
# Entry by entry, in log scale:
#
# - `analytic`: the Hessian itself.
# - `analytic_minus_empirical`: rounding everywhere. Grey entries agree to the last bit.
# - `analytic_minus_func_hessian`: grey entries agree to 12 digits of the largest one. What is left are the rows of the
#   gains, gamma_1 and gamma_2, along every parameter that comes before their norm; the transposed blocks are right.

# %%
zero = 1e-12 * float(H.matrix.abs().max())
pictures = {
    "analytic": (H.matrix, "Analytic Hessian", None),
    "analytic_minus_empirical": (H.matrix - empirical, "Analytic minus reverse over reverse", 0.0),
    "analytic_minus_func_hessian": (H.matrix - func_hessian, "Analytic minus torch.func.hessian", zero if wrong else 0.0),
}
for name, (matrix, title, zero_below) in pictures.items():
    heatmap(matrix, H.names, H.slices, title=title, zero_below=zero_below, path=folder / f"{name}.png")
    print(f"wrote {folder / name}.png")
