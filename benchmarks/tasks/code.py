"""The code of twelve tasks, as a user of hessiankit and of each peer writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import hessiankit as hk

# mypy: ignore-errors


def language_model() -> SimpleNamespace:
    """Return a GPT-2 of 28,544 parameters, a loader of 4 batches of its kind, and one of them."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config._attn_implementation = "eager"  # the peers differentiate twice
    model = transformers.GPT2LMHeadModel(config).eval()
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(64, (16, 16))]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for batch in loader:
        adam.zero_grad()
        model(**batch).loss.backward()
        adam.step()
    adam.zero_grad()
    return SimpleNamespace(model=model, loader=loader, batch=next(iter(loader)), adam=adam)


def classifier() -> SimpleNamespace:
    """Return a perceptron trained on 90 points of three classes."""
    torch.manual_seed(0)
    x = torch.randn(90, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > x[:, 0]).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        adam.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        adam.step()
    adam.zero_grad()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=30)
    return SimpleNamespace(model=model, x=x, y=y, loader=loader, points=torch.tensor([[0.5, -0.5], [6.0, 6.0]]))


class Logits(nn.Module):
    """What the peers need of a Hugging Face model: logits and labels of the next token, one row each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any) -> torch.Tensor:
        """Return the logits of all tokens but the last of each sequence, one row each."""
        return self.model(ids).logits[:, :-1].flatten(0, 1)


def pairs(loader: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a loader as inputs and labels of the next token."""
    return [(batch["input_ids"], batch["labels"][:, 1:].flatten()) for batch in loader]


# top eigenvalues ----------------------------------------------------------------------------------------------------------
def top_ours(s):
    return hk.spectrum(s.model, s.loader, k=3).eigenvalues


def top_peer(s):
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    model, data = Logits(s.model), pairs(s.loader)
    H = HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), data, num_data=16, batch_size_fn=len, check_deterministic=False
    )
    return eigsh(H.to_scipy(), k=3, which="LA", return_eigenvectors=False, tol=1e-4)[::-1].copy()


# trace and density --------------------------------------------------------------------------------------------------------
def density_ours(s):
    return hk.spectrum(s.model, s.loader, k=1, density=True, directions=2, steps=50).density()


def density_peer(s):
    from curvlinops import HessianLinearOperator, lanczos_approximate_spectrum, xtrace

    model, data = Logits(s.model), pairs(s.loader)
    H = HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), data, num_data=16, batch_size_fn=len, check_deterministic=False
    )
    return lanczos_approximate_spectrum(H, ncv=50, num_repeats=2), xtrace(H, 20)


# Gauss-Newton product -----------------------------------------------------------------------------------------------------
def ggn_ours(s):
    G = hk.hessian_operator(s.model, s.loader, kind="ggn")
    return G @ torch.ones(G.shape[0])


def ggn_peer(s):
    from curvlinops import GGNLinearOperator

    model, data = Logits(s.model), pairs(s.loader)
    G = GGNLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), data, num_data=16, batch_size_fn=len, check_deterministic=False
    )
    return G @ torch.ones(G.shape[0])


# the top eigenvalue along training ----------------------------------------------------------------------------------------
def training_ours(s):
    monitor = hk.Monitor(s.model, s.batch, s.folder / "run.jsonl", every=10, what={"eigenvalue": {}})
    for step in range(21):
        monitor.step(step)
        s.model(**s.batch).loss.backward()
        s.adam.step()
        s.adam.zero_grad()
    return hk.Monitor.read(s.folder / "run.jsonl").plot(s.folder / "run.png")


def training_peer(s):
    import matplotlib.pyplot as plt
    from pyhessian import hessian

    values, data = [], pairs([s.batch])[0]
    for step in range(21):
        if step % 10 == 0:
            s.model.zero_grad()
            H = hessian(Logits(s.model), nn.CrossEntropyLoss(), data=data, cuda=False)
            values.append(H.eigenvalues(tol=1e-2)[0][0])
            s.model.zero_grad()
        s.model(**s.batch).loss.backward()
        s.adam.step()
        s.adam.zero_grad()
    plt.plot(range(0, 21, 10), values)
    plt.savefig(s.folder / "peer.png")
    return values


# Laplace ------------------------------------------------------------------------------------------------------------------
def laplace_ours(s):
    G = hk.hessian_operator(s.model, s.x, s.y, kind="ggn", loss="cross_entropy").approximation("kfac")
    J = hk.jacobian_operator(s.model, s.points)
    return (J @ (G.mapped(lambda v: 1 / (90 * v + 1)) @ J.T.to_matrix())).diagonal()


def laplace_peer(s):
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    la = Laplace(s.model, "classification", subset_of_weights="all", hessian_structure="kron", backend=CurvlinopsGGN)
    la.fit(s.loader)
    return la._glm_predictive_distribution(s.points)[1].diagonal(dim1=1, dim2=2)


# KFAC beside the exact matrix ---------------------------------------------------------------------------------------------
def kfac_ours(s):
    return hk.approximations(s.model, s.x, s.y, loss="cross_entropy", against="ggn", of=["kfac"])["kfac"].measures.frobenius.value


def kfac_peer(s):
    from curvlinops import FisherType, GGNLinearOperator, KFACLinearOperator

    data, loss, parameters = [(s.x, s.y)], nn.CrossEntropyLoss(), list(s.model.parameters())
    G = GGNLinearOperator(s.model, loss, parameters, data, check_deterministic=False) @ torch.eye(99)
    K = KFACLinearOperator(s.model, loss, parameters, data, fisher_type=FisherType.TYPE2, check_deterministic=False)
    return torch.linalg.norm(G - K @ torch.eye(99)) / torch.linalg.norm(G)


# influence ----------------------------------------------------------------------------------------------------------------
def influence_ours(s):
    train, test = [(s.x, s.y)], [(s.points, s.y[:2])]
    return hk.influence(s.model, train, test, loss="cross_entropy", method="ekfac", damping=0.01).scores


def influence_peer(s):
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch, model, sample=False):
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self):
            return None

        def get_attention_mask(self, batch):
            return None

    task = Classification()
    model = prepare_model(s.model, task)
    train = torch.utils.data.TensorDataset(s.x, s.y)
    analyzer = Analyzer("tasks", model, task, output_dir=str(s.folder), disable_tqdm=True, cpu=True)
    analyzer.fit_all_factors("ekfac", train, per_device_batch_size=30, factor_args=FactorArguments(strategy="ekfac"))
    query = torch.utils.data.TensorDataset(s.points, s.y[:2])
    analyzer.compute_pairwise_scores(
        "scores", "ekfac", query, train, per_device_query_batch_size=2, per_device_train_batch_size=30
    )
    return analyzer.load_pairwise_scores("scores")["all_modules"]


# a closed form in a test --------------------------------------------------------------------------------------------------
def closed_form_ours(s):
    X, layer = s.x, nn.Linear(2, 3, bias=False)
    return hk.check(layer, X, torch.zeros(90, 3), analytic=lambda p: torch.kron(torch.eye(3), X.T @ X / 135).double()).passed


def closed_form_peer(s):
    X, W = s.x.double(), torch.randn(3, 2, dtype=torch.float64)
    H = torch.autograd.functional.hessian(lambda W: nn.functional.mse_loss(X @ W.T, torch.zeros(90, 3).double()), W)
    torch.testing.assert_close(H.view(6, 6), torch.kron(torch.eye(3), X.T @ X / 135).double(), rtol=1e-10, atol=1e-12)
    return True


# LaTeX of a block ---------------------------------------------------------------------------------------------------------
def latex_ours(s):
    return hk.derive(hk.TransformerBlock(2, 2), wrt=("W_Q", "W_V")).latex()


# loss landscape -----------------------------------------------------------------------------------------------------------
def landscape_ours(s):
    return hk.loss_slices(s.model, s.x, s.y, loss="cross_entropy", points=20, plane=True).plot(s.folder / "plane.png")


def landscape_peer(s):
    import loss_landscapes
    import matplotlib.pyplot as plt

    metric = loss_landscapes.metrics.Loss(nn.CrossEntropyLoss(), s.x, s.y)
    values = loss_landscapes.random_plane(s.model, metric, 1, steps=20, normalization="filter", deepcopy_model=True)
    plt.contourf(values)
    plt.savefig(s.folder / "peer.png")
    return values


# learning rates -----------------------------------------------------------------------------------------------------------
def rates_ours(s):
    return torch.optim.AdamW(hk.blockwise_lr(s.model, lr=1e-3))


def rates_peer(s):
    kinds = {"emb": ("wte", "wpe"), "norm": ("ln_",), "rest": ("",)}
    groups = {kind: [] for kind in kinds}
    for name, p in s.model.named_parameters():
        groups[next(kind for kind, parts in kinds.items() if any(part in name for part in parts))].append(p)
    ratios = {"emb": 10.0, "norm": 1.0, "rest": 4.0}
    return torch.optim.AdamW([{"params": group, "lr": 1e-3 * ratios[kind]} for kind, group in groups.items()])


# the optimizer's metric ---------------------------------------------------------------------------------------------------
def metric_ours(s):
    return hk.spectrum(s.model, s.loader, k=1, preconditioner=s.adam).threshold_ratio


def metric_peer(s):
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import LinearOperator, eigsh

    model, data = Logits(s.model), pairs(s.loader)
    H = HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), data, num_data=16, batch_size_fn=len, check_deterministic=False
    )
    state = [s.adam.state[p] for p in model.parameters()]
    P = torch.cat(
        [((x["exp_avg_sq"] / (1 - 0.999 ** x["step"])).sqrt() + 1e-8).flatten() * (1 - 0.9 ** x["step"]) for x in state]
    )
    root = P.rsqrt().numpy()
    A, S = H.to_scipy(), LinearOperator(H.shape, matvec=lambda v: root * (A @ (root * v.ravel())), dtype="float32")
    return eigsh(S, k=1, which="LA", return_eigenvectors=False, tol=1e-4)[0] / 38000


@dataclass(frozen=True)
class Task:
    """What one wants, by us and by a peer, with what one would type first."""

    name: str
    make: Callable[[], SimpleNamespace]
    ours: Callable[[SimpleNamespace], Any]
    peer: Callable[[SimpleNamespace], Any] | None
    who: str
    guesses: tuple[str, ...]
    peer_guesses: tuple[str, ...] = ()
    compare: Callable[[Any, Any], float] | None = None


def relative(a: Any, b: Any) -> float:
    """Return the largest difference over the largest entry of the second."""
    a, b = (torch.as_tensor(x, dtype=torch.float64).flatten() for x in (a, b))
    return float((a - b).abs().max() / b.abs().max())


_LM = "from curvlinops import *; m = s.model; loss = nn.CrossEntropyLoss(); "
_ARGUMENTS = "(m, loss, list(m.parameters()), s.loader)"
TASKS = (
    Task(
        "top 3 eigenvalues, Hugging Face model, DataLoader", language_model, top_ours, top_peer, "curvlinops",
        ("hk.eigenvalues(s.model, s.loader)", "hk.spectrum(s.model, s.loader, k=3)"),
        (_LM + "HessianLinearOperator" + _ARGUMENTS, "top_peer(s)"), relative,
    ),
    Task(
        "trace and density", language_model, density_ours, density_peer, "curvlinops",
        ("hk.trace(s.model, s.loader)", "hk.spectrum(s.model, s.loader, density=True)"),
        (_LM + "HessianLinearOperator" + _ARGUMENTS, "density_peer(s)"),
    ),
    Task(
        "Gauss-Newton product", language_model, ggn_ours, ggn_peer, "curvlinops",
        ("hk.ggn(s.model, s.loader)", "hk.hessian_operator(s.model, s.loader, kind='ggn') @ torch.ones(28544)"),
        (_LM + "GGNLinearOperator" + _ARGUMENTS, "ggn_peer(s)"), relative,
    ),
    Task(
        "top eigenvalue along training, with a plot", language_model, training_ours, training_peer, "PyHessian",
        ("hk.Monitor(s.model, s.batch, every=10)", "hk.Monitor(s.model, s.batch, s.folder / 'g.jsonl', every=10).step(0)"),
        ("from pyhessian import hessian; hessian(s.model, nn.CrossEntropyLoss(), data=s.batch, cuda=False)", "training_peer(s)"),
    ),
    Task(
        "Laplace, KFAC, all weights: variance of the logits", classifier, laplace_ours, laplace_peer, "laplace-torch",
        ("hk.hessian_operator(s.model, s.x, s.y, kind='ggn')",
         "hk.hessian_operator(s.model, s.x, s.y, kind='ggn', loss='cross_entropy').approximation('kfac').inverse(1.0)",
         "laplace_ours(s)"),
        ("from laplace import Laplace; Laplace(s.model, 'classification').fit(s.loader)", "laplace_peer(s)"), relative,
    ),
    Task(
        "error of KFAC against the Gauss-Newton matrix", classifier, kfac_ours, kfac_peer, "curvlinops",
        ("hk.kfac(s.model, s.x, s.y)", "hk.approximations(s.model, s.x, s.y, loss='cross_entropy')"),
        ("kfac_peer(s)",), relative,
    ),
    Task(
        "influence of 90 samples", classifier, influence_ours, influence_peer, "kronfluence (EKFAC)",
        ("hk.influence(s.model, s.loader, s.loader)", "influence_ours(s)"), ("influence_peer(s)",),
    ),
    Task(
        "one's own closed form in a test", classifier, closed_form_ours, closed_form_peer, "torch",
        ("hk.check(nn.Linear(2, 3, bias=False), s.x, torch.zeros(90, 3), analytic=torch.kron(torch.eye(3), s.x.T @ s.x / 135))",),
        ("closed_form_peer(s)",),
    ),
    Task(
        "LaTeX of a block", classifier, latex_ours, None, "none", ("hk.derive('block')", "hk.derive(hk.TransformerBlock(2, 2))")
    ),
    Task(
        "loss landscape, two random directions, 20 x 20", classifier, landscape_ours, landscape_peer, "loss-landscapes",
        ("hk.loss_slices(s.model, s.x, s.y, loss='cross_entropy')",), ("landscape_peer(s)",),
    ),
    Task(
        "AdamW with rates by block type", language_model, rates_ours, rates_peer, "by hand",
        ("torch.optim.AdamW(hk.blockwise_lr(s.model, 1e-3))",), ("rates_peer(s)",),
    ),
    Task(
        "top eigenvalue in AdamW's metric over its threshold", language_model, metric_ours, metric_peer, "curvlinops and SciPy",
        ("hk.spectrum(s.model, s.loader, optimizer=s.adam)", "hk.spectrum(s.model, s.loader, preconditioner=s.adam)"),
        ("metric_peer(s)",), relative,
    ),
)  # fmt: skip
