"""A step without a cache: upload, momentum, solve, update.

The stages are apart: `accumulate` and `descend` (matrices.py) work element by element where a parameter lies;
what is between them sees whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ..newton_schulz.normalize import computed_in, normalize
from ..newton_schulz.solvers import Solver
from ..newton_schulz.workspace import Workspace, ceiling, solve_bytes
from .host import Kept, upload
from .matrices import Matrix, accumulate, assign_factors, batches, descend, factors_of, step_lengths


def send(
    matrices: list[Matrix], more: Mapping[Hashable, tuple[Tensor, torch.device]]
) -> dict[Hashable, Tensor]:
    """Upload what the step of these matrices needs from the host, and `more`, which is returned."""
    on: dict[torch.device, list[Matrix]] = {}
    for x in matrices:
        on.setdefault(x.param.device, []).append(x)
    there = upload({**{device: (factors_of(members), device) for device, members in on.items()}, **more})
    for device, members in on.items():
        assign_factors(members, there[device])
    return there


def solve_step(
    matrices: list[Matrix], kept: Kept, solver_of: Callable[[Matrix], Solver]
) -> Iterator[tuple[list[Matrix], Tensor]]:
    """A whole step without a cache. Yields batches, and on the device which of their gradients are finite."""
    for batch, D, finite in directions(matrices, kept, solver_of):
        descend(batch, D.mul_(step_lengths(batch, D, finite)), finite)
        yield batch, finite


def directions(
    matrices: list[Matrix], kept: Kept, solver_of: Callable[[Matrix], Solver]
) -> Iterator[tuple[list[Matrix], Tensor, Tensor]]:
    """Momentum and fresh directions: batches, their wide directions, and which gradients are finite."""
    most = ceiling_of(matrices)
    for batch in prepared_batches(matrices, lambda x: x, lambda x: x.kind, _solve_room, most, kept):
        update, workspace = accumulate(batch, kept.workspace), kept.workspace
        X = normalize(update.U, batch[0].group["eps"], scratch_like(workspace, update.U), update.peak)
        finite = update.finite
        del update  # or it would live beside the next batch's
        yield batch, solver_of(batch[0]).solve(X, workspace), finite


def _solve_room(x: Matrix) -> int:
    return solve_bytes(*x.shape, x.precision.itemsize)


def ceiling_of(matrices: Iterable[Matrix]) -> int:
    """The bytes that a step may take beside the state, where these are worked on: half of them, where the
    other half is for what travels between ranks.
    """
    asked = {(x.group["max_workspace_bytes"], x.param.device.type, x.party is not None) for x in matrices}
    return min((ceiling(size, kind) // (1 + shared) for size, kind, shared in asked), default=1)


Item = TypeVar("Item")


def prepared_batches(
    items: Iterable[Item],
    matrix_of: Callable[[Item], Matrix],
    kind: Callable[[Item], Hashable],
    room: Callable[[Item], int],
    ceiling: int,
    kept: Kept,
) -> Iterator[list[Item]]:
    """`batches`, with the workspace prepared for each."""
    for batch in batches(items, kind, room, ceiling):
        first, need = matrix_of(batch[0]), sum(map(room, batch))
        kept.workspace.prepare(len(batch), *first.shape, first.precision.itemsize, need, ceiling)
        yield batch


def scratch_like(workspace: Workspace, U: Tensor) -> Tensor:
    """Memory like U, in the precision that it is worked on in."""
    return workspace.like("scratch", U, computed_in(U.dtype))
