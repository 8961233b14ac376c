"""Rivals that are not a Muon with another solver: Dion2, Dion3 and AdaMuon, written from their descriptions.

The matrices of one shape are one batch. Convolutions are flattened to (out, in * height * width). Adam
updates all other parameters, as in `Muon`. `soap` gives the same groups to pytorch_optimizer's SOAP.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from cachemuon import GramNS
from cachemuon.engine.bucket import is_dtensor
from cachemuon.engine.plan import lr_ratio
from cachemuon.optim.adam import ADAM_DEFAULTS, adam_step
from cachemuon.optim.muon import solver_prices

EPS = 1e-8
SOLVER = GramNS()


class Rival(Optimizer):
    """Adam for groups with `use_muon=False`; a subclass says which direction D each matrix W takes.

    `W <- (1 - lr weight_decay) W - lr ratio D`, with the ratio that `adjust_lr_fn` names for the shape of W.
    """

    around_matrices: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context that each step enters for its matrices, after Adam."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        adjust_lr_fn: str = "none",
        **settings: Any,
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adjust_lr_fn": adjust_lr_fn}
        own |= {"step": 0, "view": "flatten", "split": 1, "transposed": False, **settings}
        made = [{**(own if group["use_muon"] else ADAM_DEFAULTS), **group} for group in groups]
        if any(is_dtensor(param) for group in made for param in group["params"]):
            raise ValueError(f"{type(self).__name__} must have whole parameters, got shards")
        super().__init__(made, {})

    @abstractmethod
    def entries(self, rows: int, cols: int) -> dict[str, tuple[int, int]]:
        """The state of a rows x cols matrix: the shape of each entry."""

    @abstractmethod
    def solved(self, group: dict[str, Any], rows: int, cols: int) -> tuple[int, int]:
        """The shape that is orthogonalized for a rows x cols matrix."""

    @abstractmethod
    def directions(self, group: dict[str, Any], G: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The directions for the gradients `G (B, rows, cols)`; updates the batched state in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `closure`, if given, recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_grad = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for group, params in zip(self.param_groups, with_grad, strict=True):
            if not group["use_muon"]:
                adam_step(group, params, self.state)
        with self.around_matrices():
            for group, params in zip(self.param_groups, with_grad, strict=True):
                if group["use_muon"]:
                    group["step"] += 1
                    for shape in dict.fromkeys(param.shape for param in params):
                        self._move(group, [param for param in params if param.shape == shape])
        return loss

    def _move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """One step of matrices of one shape."""
        rows, cols = sides(params[0])
        states = [self.state[param] for param in params]
        for (name, shape), state in ((e, s) for e in self.entries(rows, cols).items() for s in states):
            if name not in state:
                state[name] = params[0].new_zeros(shape)
        G = torch.stack([param.grad.reshape(rows, cols) for param in params if param.grad is not None])
        kept = {name: torch.stack([state[name] for state in states]) for name in self.entries(rows, cols)}
        D = self.directions(group, G, kept)
        for name, batch in kept.items():
            torch._foreach_copy_([state[name] for state in states], list(batch.unbind(0)))
        D *= -group["lr"] * lr_ratio(group["adjust_lr_fn"], rows, cols)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, [one.reshape(params[0].shape) for one in D.unbind(0)])

    def counted(self) -> tuple[int, int, int]:
        """So far: matrices that were solved, and the FLOPs of that, executed and by the paper's model."""
        calls = flops = by_paper = 0
        for group in self.param_groups:
            for param in group["params"] if group["use_muon"] else ():
                n, m = sorted(self.solved(group, *sides(param)))
                price, papers = solver_prices(SOLVER, n, m, SOLVER.precision(param))
                calls += group["step"]
                flops += group["step"] * price
                by_paper += group["step"] * papers
        return calls, flops, by_paper


class Dion2(Rival):
    """Dion2 (microsoft/dion): orthogonalize only the rows of the momentum with the largest l1 norms.

    `M <- M + G`; of M's shorter side, the fraction of the rows (or columns) with the largest l1 norms is
    orthogonalized, and W moves there only. Error feedback: these rows of M are then multiplied by `momentum`,
    the others accumulate until they are selected. Dion2's own `lr` ratio "rms_norm" is "match_rms_adamw".

    >>> W = torch.nn.Parameter(torch.zeros(4, 6))
    >>> W.grad = torch.arange(24.0).view(4, 6)
    >>> Dion2([{"params": [W], "use_muon": True}], lr=1.0, fraction=0.25).step()
    >>> W.abs().sum(1).nonzero().flatten()
    tensor([3])
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, fraction: float = 0.25, **settings: Any) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be greater than 0 and at most 1, got {fraction!r}")
        super().__init__(groups, fraction=fraction, **settings)

    def entries(self, rows: int, cols: int) -> dict[str, tuple[int, int]]:
        """The momentum."""
        return {"momentum": (rows, cols)}

    def solved(self, group: dict[str, Any], rows: int, cols: int) -> tuple[int, int]:
        """A fraction of the shorter side."""
        return selected(group["fraction"], min(rows, cols)), max(rows, cols)

    def directions(self, group: dict[str, Any], G: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Directions with zeros wherever nothing was selected."""
        M = state["momentum"].add_(G)
        return self._of_rows(group, M) if M.shape[-2] <= M.shape[-1] else self._of_rows(group, M.mT).mT

    def _of_rows(self, group: dict[str, Any], M: Tensor, squares: Tensor | None = None) -> Tensor:
        """The directions of selected rows of `M (B, rows, cols)`, whose momentum then decays."""
        number = selected(group["fraction"], M.shape[-2])
        index = M.abs().sum(-1, keepdim=True).topk(number, dim=-2, sorted=False).indices  # (B, number, 1)
        whole = index.expand(-1, -1, M.shape[-1])
        U = SOLVER(M.gather(-2, whole))
        if squares is not None:
            V = squares.gather(-2, index)
            U = normalized_rows(U, V, group["beta2"])
            squares.scatter_(-2, index, V)
        M.mul_(torch.ones_like(M[..., :1]).scatter_(-2, index, group["momentum"]))
        return torch.zeros_like(M).scatter_(-2, whole, U)


class Dion3(Dion2):
    """Dion3, also named NorDion2 (microsoft/dion): Dion2's selection and NorMuon's normalization.

    Always selects rows, which are neurons. The rows of the orthogonalized selection are divided by the root
    of the running mean (`beta2`) of their mean square, and then multiplied by one number that restores the
    Frobenius norm. A neuron's running mean begins at 0 and changes only when the neuron is selected.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, beta2: float = 0.95, **settings: Any) -> None:
        super().__init__(groups, beta2=beta2, **settings)

    def entries(self, rows: int, cols: int) -> dict[str, tuple[int, int]]:
        """The momentum, and the running mean square of each row."""
        return {"momentum": (rows, cols), "squares": (rows, 1)}

    def solved(self, group: dict[str, Any], rows: int, cols: int) -> tuple[int, int]:
        """A fraction of the rows."""
        return selected(group["fraction"], rows), cols

    def directions(self, group: dict[str, Any], G: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Directions with zeros in the rows that were not selected."""
        return self._of_rows(group, state["momentum"].add_(G), state["squares"])


class AdaMuon(Rival):
    """AdaMuon (arXiv 2507.11005, version 3): second moments of each element of the orthogonalized direction.

    `M <- momentum M + G`, `O = polar(sign(M))` (with `nesterov` of `sign(momentum M + G)`),
    `V <- beta2 V + (1 - beta2) O^2`, `D = O / (sqrt(V) + eps)`, multiplied by one number so that `|D|_F` is
    the root of the shorter side, as that of a polar factor is. With `adjust_lr_fn="match_rms_adamw"` that is
    the paper's length, `0.2 sqrt(rows cols)`.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        nesterov: bool = False,
        beta2: float = 0.95,
        **settings: Any,
    ) -> None:
        super().__init__(groups, nesterov=nesterov, beta2=beta2, **settings)

    def entries(self, rows: int, cols: int) -> dict[str, tuple[int, int]]:
        """The momentum, and the second moment of each element."""
        return {"momentum": (rows, cols), "squares": (rows, cols)}

    def solved(self, group: dict[str, Any], rows: int, cols: int) -> tuple[int, int]:
        """All of it."""
        return rows, cols

    def directions(self, group: dict[str, Any], G: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Directions of the Frobenius norm that a polar factor has."""
        M, V = state["momentum"].mul_(group["momentum"]).add_(G), state["squares"]
        U = torch.add(G, M, alpha=group["momentum"]) if group["nesterov"] else M
        D = SOLVER(U.sign())
        V.lerp_(D.square(), 1 - group["beta2"])
        D /= V.sqrt() + EPS
        return D * (math.sqrt(min(M.shape[-2:])) / frobenius(D))


def soap(
    groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> Optimizer:
    """pytorch_optimizer's SOAP for matrices, convolutions in their own dimensions; its Adam for the rest.

    Its Adam is SOAP whose tensors are too large for a basis of their own. The first step of all parameters is
    skipped, as SOAP's authors do: it only begins the statistics.
    """
    own = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    made = [
        {**own, **group} if group["use_muon"] else {**ADAM_DEFAULTS, **group, "max_precondition_dim": 1}
        for group in groups
    ]
    try:
        library = import_module("pytorch_optimizer")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("SOAP needs pytorch_optimizer: pip install 'cachemuon[peers]'") from error
    optimizer: Optimizer = library.SOAP(made)
    return optimizer


def soap_flops(optimizer: Optimizer) -> int:
    """What a SOAP multiplied so far for its matrices; 0 for any other optimizer."""
    groups = [group for group in optimizer.param_groups if "precondition_frequency" in group]
    spent = 0.0
    for group in groups:
        for param in group["params"] if group["use_muon"] else ():
            steps = max(group.get("step", 0) - 1, 0)
            spent += steps * soap_step_flops(param.shape, group["precondition_frequency"])
    return round(spent)


def soap_step_flops(shape: Sequence[int], every: int) -> float:
    """The FLOPs of a step of SOAP on a tensor: products with its bases, and a share of their renewal.

    Each dimension d of a tensor of N elements takes part in one outer product and three projections, of
    2 N d each; every so many steps its basis is renewed by a product and a QR decomposition, 14/3 d^3.

    >>> soap_step_flops((3, 6), every=7)
    1458.0
    """
    return sum(8 * math.prod(shape) * d + 14 / 3 * d**3 / every for d in shape)


def sides(param: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter, flattened."""
    return param.shape[0], math.prod(param.shape[1:])


def selected(fraction: float, rows: int) -> int:
    """How many rows are selected, at least one.

    >>> selected(0.25, 6), selected(0.25, 2)
    (2, 1)
    """
    return max(1, math.ceil(fraction * rows))


def normalized_rows(U: Tensor, V: Tensor, beta2: float) -> Tensor:
    """NorMuon's rows: `U / sqrt(V)` with the Frobenius norm of U; V, their mean square, is updated."""
    V.lerp_(U.square().mean(-1, keepdim=True), 1 - beta2)
    D = U / (V.sqrt() + EPS)
    return D * (frobenius(U) / frobenius(D))


def frobenius(X: Tensor) -> Tensor:
    """The Frobenius norm of each matrix of a batch, `(B, 1, 1)`; never 0."""
    norm: Tensor = torch.linalg.matrix_norm(X, keepdim=True)
    return norm.clamp(min=EPS)
