"""One step over all matrices: this is the algorithm.

Momentum, decay and update work in the parameter's own layout, also for tall matrices, whose wide form is a
transposed view: adding a matrix to one that lies the other way takes ten times as long. Nothing reads a
tensor on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor

from .bucket import Bucket, Matrix, grouped, local
from .orthogonalize import Direction, Update, rows_of
from .plan import Plan
from .schedule import PEAK, PROBED, REFRESHED, Readings


class Exchange(Protocol):
    """What is around the orthogonalization: where gradients come from, and where directions go."""

    def gather(self, outcomes: list[int]) -> Iterator[list[Update]]:
        """What is orthogonalized, of buckets that are worked on together; `outcomes` are what each matrix of
        the plan is to do.
        """

    def scatter(self, direction: Direction) -> None:
        """Take the steps of some rows of an update."""

    def measured(self) -> Readings:
        """What the step has measured, after all its directions."""


def take_step(plan: Plan, exchanges: Sequence[Exchange], number: int) -> list[str]:
    """Step `number`: momentum, direction and update of every matrix.

    What each matrix is to do follows from the number, and from what earlier steps have measured. What this
    step measures stays on the device until the next one begins. Returns what went wrong at earlier steps.
    """
    told = plan.learn()
    outcomes = plan.schedule.outcomes(number)
    plan.fill(number)
    for exchange in exchanges:
        for updates in exchange.gather(outcomes):
            for direction in updates[0].bucket.orthogonalize(updates, number, plan.workspace):
                if (normalization := direction.update.bucket.normalization) is not None:
                    normalization.apply(direction)
                exchange.scatter(direction)
                del direction  # its memory is for the next one
            del updates
    plan.send(number, outcomes, [exchange.measured() for exchange in exchanges])
    return told


class Local:
    """The exchange of one rank with itself: gradients and parameters are here, whole."""

    def __init__(self, plan: Plan, buckets: list[Bucket]) -> None:
        self.plan, self.together = plan, grouped(buckets)
        self.readings = Readings(buckets)

    def gather(self, outcomes: list[int]) -> Iterator[list[Update]]:
        """Take in the gradient of every matrix that has one."""
        self.readings.clear()
        for buckets in self.together:
            updates: list[Update] = []
            for bucket in buckets:
                rows = [row for row, x in enumerate(bucket.matrices) if x.param.grad is not None]
                if rows:
                    U, peak = take_in(bucket, rows, self.plan, place=len(updates))
                    matrices = [bucket.matrices[row] for row in rows]
                    wanted, kept = [outcomes[x.number] for x in matrices], self.plan.kept(bucket, matrices)
                    updates.append(make_update(bucket, rows, wanted, U, peak, kept))
                    self.readings.note(updates[-1], PEAK, peak)
            if updates:
                yield updates

    def scatter(self, direction: Direction) -> None:
        """Decay and update of the parameters."""
        update, bucket = direction.update, direction.update.bucket
        steps = (direction.D.mT if bucket.tall else direction.D).unbind(0)
        step_down(bucket, update.rows, steps, torch.isfinite(update.peak).flatten())
        self.readings.note(update, PROBED, direction.probed)
        self.readings.note(update, REFRESHED, direction.refreshed)

    def measured(self) -> Readings:
        """What the step has measured."""
        return self.readings


def gradient(x: Matrix) -> Tensor:
    """The gradient of a matrix's parameter, in the parameter's dtype."""
    grad = x.param.grad
    assert grad is not None
    return grad if grad.dtype == x.param.dtype else grad.to(x.param.dtype)


def take_in(
    bucket: Bucket,
    rows: list[int],
    plan: Plan,
    gradient_of: Callable[[Matrix], Tensor] = gradient,
    finite: Tensor | None = None,
    place: int = 0,
) -> tuple[Tensor, Tensor]:
    """The momentum of some rows takes in their gradients. Returns `U (B, rows, cols)`, which is to be
    orthogonalized, and `max|U| (B, 1, 1)`.

    A NaN or Inf is dealt with on the device: where `max|U|` is not finite, or `finite (B,)` not set, which
    says of which gradients all ranks have finite parts, the momentum stays as it is; U has zeros for a NaN or
    Inf. U lies in the workspace, until the next call with the same `place`.
    """
    workspace, matrices = plan.workspace, [bucket.matrices[row] for row in rows]
    sides = (bucket.cols, bucket.rows) if bucket.tall else (bucket.rows, bucket.cols)
    room = bucket.room // len(bucket.matrices) * len(rows)
    workspace.prepare(len(rows), *sides, bucket.precision.itemsize, room, bucket.limit)
    shape = bucket.rows, bucket.cols
    grads = [grad.reshape(shape) for grad in pieces(matrices, gradient_of)]
    momenta = [momentum.view(shape) for momentum in pieces(matrices, plan.momentum)]
    numbers = rows_of(bucket.factors, rows)  # `plan.factors`
    weight, share = numbers[:, 2].view(-1, 1, 1), numbers[:, 3].view(-1, 1, 1)
    role = f"gradient {place}"
    G = workspace.stack(role, grads, bucket.precision)
    M = workspace.stack("momentum", momenta, bucket.precision)
    copied = len(rows) > 1 or momenta[0].dtype != bucket.precision
    U = torch.lerp(M, G, weight, out=G if copied else workspace.like(role, M))
    # `max|U|`: on a CPU nine times faster than the infinity norm.
    peak = torch.maximum(U.amax(dim=(-2, -1), keepdim=True), -U.amin(dim=(-2, -1), keepdim=True))
    U.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    M.lerp_(U, share * (torch.isfinite(peak) if finite is None else finite.view(-1, 1, 1)))
    if copied:
        torch._foreach_copy_(momenta, list(M.unbind(0)))
    return U, peak


def make_update(
    bucket: Bucket, rows: list[int], wanted: list[int], U: Tensor, peak: Tensor, kept: dict[str, list[Tensor]]
) -> Update:
    """What the orthogonalizer of a bucket is given for `U (B, rows, cols)`, which is divided by its peak, in
    place; the `scale` that is left brings it to `U / (|U|_F + eps)`.
    """
    finite = torch.isfinite(peak)
    inverse = 1 / torch.where(finite, peak, 1).clamp_(min=torch.finfo(U.dtype).tiny)
    norm = torch.linalg.vector_norm(U.mul_(inverse), dim=(-2, -1), keepdim=True)
    scale = 1 / (norm + bucket.matrices[0].group["eps"] * inverse).clamp_(min=1)  # below 1 is only a zero
    factor = rows_of(bucket.factors, rows)[:, 0].view(-1, 1, 1)
    if bucket.lr is not None:
        factor = factor * bucket.lr.to(factor.dtype)
    gain = finite.to(factor.dtype) if bucket.normalization is not None else factor * finite
    X = U.mT if bucket.tall else U
    return Update(bucket, rows, wanted, X, scale, gain, peak, kept, factor, bucket.block)


def step_down(bucket: Bucket, rows: list[int], steps: Iterable[Tensor], finite: Tensor) -> None:
    """`W <- (1 - lr weight_decay) W + step` for rows of a bucket; W stays where `finite (B,)` is not set."""
    keep = rows_of(bucket.factors, rows)[:, 1]
    if bucket.lr is not None:
        keep = 1 + (keep - 1) * bucket.lr.to(keep.dtype)
    keep = torch.where(finite, keep, 1)
    params = pieces([bucket.matrices[row] for row in rows], attrgetter("param"))
    shaped = [step.reshape(param.shape) for step, param in zip(steps, params, strict=True)]
    if len(params) == 1:
        torch.addcmul(shaped[0], params[0], keep, out=params[0])
        return
    torch._foreach_mul_(params, list(keep.unbind(0)))
    torch._foreach_add_(params, shaped)


def pieces(matrices: Iterable[Matrix], tensor_of: Callable[[Matrix], Tensor]) -> list[Tensor]:
    """For each matrix its piece of a tensor that has the shape of its parameter, as a view."""
    found: list[Tensor] = []
    last: Tensor | None = None
    parts: list[Tensor] = []
    for x in matrices:
        if x.place is None and last is x.param:  # a stack, or parts: cut once for all of its matrices
            found.append(parts[x.index])
            continue
        tensor = local(tensor_of(x)) if x.sharded else tensor_of(x)
        if x.place is not None:
            tensor = tensor[x.place]
        elif len(x.layout.views) > 1 or x.layout.lead:
            last, parts = x.param, x.layout.split(tensor)
            tensor = parts[x.index]
        found.append(tensor)
    return found
