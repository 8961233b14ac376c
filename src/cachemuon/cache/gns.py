"""CacheGNS, Algorithm A.4: measure the cached direction, read the residual, accept it or solve.

This is the paper's gate. The optimizers use it with `gate="residual"` and in `CacheMuon.paper`; their default
is a schedule (`engine.orthogonalize`), which reads nothing within a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..newton_schulz.normalize import computed_in, peak_of, prescale_, restore, wide_batch
from ..newton_schulz.products import Workspace, full_precision
from ..report.counters import EXPIRED, FIRST, HIT, NON_FINITE, OUTCOMES, REJECTED, Event
from .reuse import Reuse, random_block, sketched_residual


class Decided(NamedTuple):
    """What was decided about some rows of a batch: their directions, and the new transforms of a solve, with
    the residuals of its directions.
    """

    outcome: int
    rows: list[int]
    direction: Tensor
    transform: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True)
class CacheGNS(Reuse):
    """CacheGNS, Algorithm A.4. Stateless: the transform goes in and comes out.

    `probe="exact"` is the paper's: the candidate `C = Q X` is formed and its residual computed.
    `probe="sketch"` estimates the same number from `vectors` random vectors, and forms `Q X` only once it is
    accepted.

    With `clip`, a fraction of the rows (None: `rank`), a cached direction is repaired before it is judged.
    The directions that Q amplifies most are cut to a singular value of about 1 (`cache.reuse` has the
    formulas). Where more directions are long than are clipped, the result is shortened to a spectral norm of
    about `max_norm`; its residual is the one before shortening.

    >>> solver = CacheGNS()
    >>> M = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    >>> direction, transform, event = solver(M, None, gamma=5.0)
    >>> event.reason
    'first'
    >>> direction, transform, event = solver(M + 0.001, transform, gamma=5.0, step=1)
    >>> event.hit, event.age
    (True, 1)
    """

    @torch.no_grad()
    def __call__(
        self,
        M: Tensor,
        transform: Tensor | None,
        gamma: float,
        *,
        age: int = 0,
        max_age: int | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> tuple[Tensor, Tensor | None, Event | tuple[Event, ...]]:
        """The direction of `M (..., n, m)`, the transform to keep, and what was decided.

        `age` is that of the given transform: 0 right after its refresh. A batch is decided matrix by matrix
        and gives a tuple of events. A matrix with a NaN or Inf gets a zero direction and keeps its transform.
        The call reads the residuals on the host.
        """
        check_gate(gamma, max_age)
        with full_precision(M.device.type):
            U = wide_batch(M).to(computed_in(M.dtype), copy=True)
            B, n = U.shape[:2]
            if transform is not None and transform.shape != (wanted := (*M.shape[:-2], n, n)):
                raise ValueError(f"transform must have shape {wanted}, got {tuple(transform.shape)}")
            peak = peak_of(U)
            finite = torch.isfinite(peak)
            scale = prescale_(U.nan_to_num_(0, 0, 0), torch.where(finite, peak, 1), self.fresh.eps)
            block = random_block(n, self.columns(n), seed=seed, step=step, dtype=U.dtype).to(U.device)
            Q = None if transform is None else transform.reshape(B, n, n)
            due = max_age is not None and age + 1 > max_age
            before = None if Q is None or due else list(Q.unbind(0))
            gain, workspace = torch.ones_like(scale), Workspace()
            residual, parts = self.gate(U, scale, gain, peak, before, gamma, block, workspace)
            residuals = residual.tolist()
            direction = torch.zeros_like(U)
            kept = U.new_zeros(B, n, n) if Q is None else Q.clone()
            events: list[Event] = [Event("non-finite", age=0 if Q is None else age + 1) for _ in range(B)]
            for part in parts:
                direction[part.rows] = part.direction
                outcome = OUTCOMES[EXPIRED if due and part.outcome == FIRST else part.outcome]
                refreshed = [math.nan] * B if part.residual is None else part.residual.tolist()
                if part.transform is not None:
                    kept[part.rows] = part.transform
                for place, row in enumerate(part.rows):
                    steps = age + 1 if part.outcome == HIT else 0
                    events[row] = Event(outcome, residuals[row], refreshed[place], steps)
        shaped = None if Q is None and not torch.any(finite) else kept.reshape(*M.shape[:-2], n, n)
        return restore(direction, M), shaped, tuple(events) if M.ndim > 2 else events[0]

    def gate(
        self,
        U: Tensor,
        scale: Tensor,
        gain: Tensor,
        peak: Tensor,
        transforms: list[Tensor] | None,
        gamma: float,
        block: Tensor,
        workspace: Workspace,
    ) -> tuple[Tensor, Iterator[Decided]]:
        """Algorithm A.4 for a batch `X = scale U (B, n, m)`: the residuals, and the directions times `gain`.

        `transforms` are the cached ones, if there are any that may be used; `peak` is not finite where the
        gradient was not. U may be overwritten. This is the one place where a step waits for the device. The
        residual of a fresh direction is estimated under either probe: the exact one would cost another
        product.
        """
        residual, repair = torch.full_like(scale.flatten(), math.nan), None
        Q = None if transforms is None else torch.stack(transforms).to(U.dtype)
        if Q is not None:
            residual, repair = self.measure([U], scale, Q, block)
        peaks, residuals = torch.stack((peak.flatten().to(residual), residual)).tolist()
        solved = FIRST if Q is None else REJECTED
        outcomes = [
            NON_FINITE if not math.isfinite(p) else HIT if Q is not None and r <= gamma else solved
            for p, r in zip(peaks, residuals, strict=True)
        ]

        def parts() -> Iterator[Decided]:
            nonlocal Q, repair
            hits = [row for row, outcome in enumerate(outcomes) if outcome == HIT]
            if hits and Q is not None and repair is not None:
                some = slice(None) if len(hits) == len(U) else hits
                own = [U[some]], scale[some], gain[some], Q[some], repair.of(some)
                (D,) = self.apply(*own, workspace)
                yield Decided(HIT, hits, D)
            Q = repair = None  # their memory is for the solves
            rows = [row for row, outcome in enumerate(outcomes) if outcome == solved]
            if rows:
                X = U.mul_(scale) if len(rows) == len(U) else U[rows] * scale[rows]
                D, made = self.fresh.solve_with_transform(X, workspace)  # FreshGNS, Algorithm A.3
                refreshed = sketched_residual(block[:, : self.vectors], D)
                yield Decided(solved, rows, D.mul_(gain[rows]), made, refreshed)

        return residual, parts()


def check_gate(gamma: float, max_age: int | None) -> None:
    """Refuse a threshold or an age limit that is out of range."""
    if not (isinstance(gamma, int | float) and gamma >= 0):
        raise ValueError(f"gamma must be a number >= 0, got {gamma!r}")
    if max_age is not None and not (isinstance(max_age, int) and max_age >= 0):
        raise ValueError(f"max_age must be an integer >= 0 or None, got {max_age!r}")
