"""The exchange of one rank with itself: gradients and parameters are here, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..newton_schulz.normalize import prescale_
from .bucket import Bucket, Matrix, pieces
from .momentum import descend, update_momentum
from .orthogonalize import Direction, Update, rows_of
from .plan import Plan
from .readings import Readings


def gradient(x: Matrix) -> Tensor:
    """The gradient of a matrix's parameter, in the parameter's dtype."""
    grad = x.param.grad
    assert grad is not None
    return grad if grad.dtype == x.param.dtype else grad.to(x.param.dtype)


class Local:
    """Matrices that no other rank has anything to do with."""

    def __init__(self, plan: Plan, buckets: list[Bucket]) -> None:
        self.plan, self.together = plan, grouped(buckets)
        self.readings = Readings(buckets)

    def gather(self, outcomes: list[int]) -> Iterator[list[Update]]:
        """Take in the gradient of every matrix that has one."""
        self.readings.clear()
        for buckets in self.together:
            stepped = [
                (bucket, [row for row, x in enumerate(bucket.matrices) if x.param.grad is not None])
                for bucket in buckets
            ]
            if any(rows for _, rows in stepped):
                yield [
                    self._update(bucket, rows, place, outcomes)
                    for place, (bucket, rows) in enumerate(stepped)
                    if rows
                ]

    def _update(self, bucket: Bucket, rows: list[int], place: int, outcomes: list[int]) -> Update:
        matrices = [bucket.matrices[row] for row in rows]
        U, peak = take_in(bucket, rows, self.plan, place=place)
        wanted = [outcomes[x.number] for x in matrices]
        update = normalized(bucket, rows, wanted, U, peak, self.plan.kept(bucket, matrices))
        self.readings.note_peaks(update)
        return update

    def scatter(self, direction: Direction) -> None:
        """Decay and update of the parameters."""
        bucket, peak = direction.update.bucket, direction.update.peak
        finite = torch.isfinite(rows_of(peak, direction.rows)).flatten()
        step_down(bucket, direction.bucket_rows, bucket.wide(direction.D).unbind(0), finite)
        self.readings.note(direction)

    def measured(self) -> Readings:
        """What the step has measured."""
        return self.readings


def grouped(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Buckets that are worked on together, as far as they fit their limit of working memory."""
    found: list[list[Bucket]] = []
    for bucket in buckets:
        for group in found:
            first, taken = group[0], sum(one.room for one in group)
            if bucket.alike(first) and taken + bucket.room <= first.limit:
                group.append(bucket)
                break
        else:
            found.append([bucket])
    return found


def take_in(
    bucket: Bucket,
    rows: list[int],
    plan: Plan,
    gradient_of: Callable[[Matrix], Tensor] = gradient,
    finite: Tensor | None = None,
    place: int = 0,
) -> tuple[Tensor, Tensor]:
    """The momentum of some rows takes in their gradients. Returns `U (B, rows, cols)` and `max|U|`.

    `finite (B,)` says which gradients are finite on all ranks, where several have parts of a matrix. U lies
    in the workspace, until the next call with the same `place`.
    """
    plan.prepare(bucket, len(rows))
    matrices = [bucket.matrices[row] for row in rows]
    shape = bucket.rows, bucket.cols
    grads = [grad.reshape(shape) for grad in pieces(matrices, gradient_of)]
    momenta = [momentum.view(shape) for momentum in pieces(matrices, plan.momentum)]
    weight, share = (rows_of(bucket.factors, rows)[:, column].view(-1, 1, 1) for column in (2, 3))
    return update_momentum(grads, momenta, weight, share, bucket.precision, plan.workspace, finite, place)


def normalized(
    bucket: Bucket, rows: list[int], wanted: list[int], U: Tensor, peak: Tensor, kept: list[Tensor]
) -> Update:
    """What the orthogonalizer of a bucket is given for `U (B, rows, cols)`, which is scaled in place."""
    finite = torch.isfinite(peak)
    scale = prescale_(U, torch.where(finite, peak, 1), bucket.matrices[0].group["eps"])
    gain = rows_of(bucket.factors, rows)[:, 0].view(-1, 1, 1) * finite
    if bucket.lr is not None:
        gain = gain * bucket.lr.to(gain.dtype)
    return Update(bucket, rows, wanted, bucket.wide(U), scale, gain, peak, kept, bucket.block)


def step_down(bucket: Bucket, rows: list[int], steps: Iterable[Tensor], finite: Tensor) -> None:
    """`W <- (1 - lr weight_decay) W + step` for rows of a bucket; W stays where `finite (B,)` is not set."""
    keep = rows_of(bucket.factors, rows)[:, 1]
    if bucket.lr is not None:
        keep = 1 + (keep - 1) * bucket.lr.to(keep.dtype)
    params = pieces([bucket.matrices[row] for row in rows], _parameter)
    shaped = [step.reshape(param.shape) for step, param in zip(steps, params, strict=True)]
    descend(params, shaped, torch.where(finite, keep, 1))


def _parameter(x: Matrix) -> Tensor:
    return x.param
