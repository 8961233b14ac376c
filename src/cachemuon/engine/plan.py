"""The plan of an optimizer: its matrices in buckets, and all that a step needs beside their state.

It is a pure function of parameter groups and state, and is made again when these are not what it was made
from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..newton_schulz.normalize import computed_in
from ..newton_schulz.workspace import Workspace, memory_limit
from ..report.counters import entry_name
from .bucket import Bucket, Matrix, local
from .kinds import Choice, Group, Kind, Method, RanksOf, kinds_of, matrices_of, on_device, settings_of
from .momentum import lr_ratio, weights
from .readings import Readings
from .schedule import MISSING, Schedule
from .transfer import Block, DeviceValues, Readback

State = dict[Tensor, dict[str, Any]]

WARN_NON_FINITE = (
    "a gradient has a NaN or Inf: that matrix, its momentum and its transform were left as they were for the "
    "step; cache_stats() counts such steps as 'non-finite'. This is said once."
)
WARN_MISSING = (
    "a parameter has a gradient on some ranks and none on others: no rank steps it. This is said once."
)


@dataclass(eq=False)
class Chunk:
    """Matrices that will be a bucket: wholes, or what a rank has of them, of these sides.

    Only buckets that orthogonalize need the random `block`.
    """

    matrices: list[Matrix]
    sides: tuple[int, int]
    choice: Choice
    block: Block | None


class Plan:
    """See above. `kinds` are all matrices; `exchanges` the ways in which buckets of them are stepped."""

    def __init__(
        self,
        groups: list[Group],
        state: State,
        method: Method,
        ranks_of: RanksOf = lambda group, param: (),
    ) -> None:
        self.groups, self.state, self.method = groups, state, method
        self.key = settings_of(groups, method.settings)
        self.params = [param for group in groups for param in group["params"]]
        self.forms = [(param.shape, param.dtype, param.device) for param in self.params]
        self.device_types = {param.device.type for param in self.params}
        self.workspace = Workspace()
        self.matrices = list(matrices_of(groups))
        self.kinds = kinds_of(self.matrices, method, ranks_of)
        self.choices: dict[int, Choice] = {}  # by the matrix's number
        phases: dict[int, int] = {}
        for kind in self.kinds:
            for x, phase in zip(kind.matrices, kind.phases, strict=True):
                self.choices[x.number], phases[x.number] = kind.choice, phase
        lives = [self.choices[x.number].life._replace(phase=phases[x.number]) for x in self.matrices]
        self.schedule = Schedule(lives)
        self._values: list[tuple[DeviceValues, list[Matrix]]] = []
        self._factors: Any = None
        self._sent: list[tuple[int, list[int], Tensor, list[int], Readback]] = []
        # Counters and residuals of each parameter, before and after its state has them.
        self._waiting: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._begun: dict[Tensor, tuple[Tensor, Tensor]] = {}
        for x in self.matrices:
            if x.index == 0:
                self._adopt(x)

    def chunks(
        self, kind: Kind, matrices: list[Matrix], share: int = 1, piece: tuple[int, int] | None = None
    ) -> list[Chunk]:
        """Matrices of a kind in their order, as many together as fit a share of `max_workspace_bytes`.

        `piece` are the sides of what this rank has of each, where that is not all.
        """
        first = matrices[0]
        limit = memory_limit(first.group["max_workspace_bytes"], first.param.device.type) // share
        size = max(limit // kind.choice.room, 1)
        sides = piece or first.layout.views[first.index].sides
        block = None if piece else kind.choice.block
        return [
            Chunk(matrices[i : i + size], sides, kind.choice, block) for i in range(0, len(matrices), size)
        ]

    def buckets(self, chunks: list[Chunk]) -> list[Bucket]:
        """Chunks as buckets, in their order. What their steps need on a device is one tensor there."""
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, chunk in enumerate(chunks):
            param = chunk.matrices[0].param
            alike.setdefault((param.device, computed_in(param.dtype)), []).append(place)
        found: dict[int, Bucket] = {}
        for where, places in alike.items():
            members = [chunks[place] for place in places]
            matrices = [x for chunk in members for x in chunk.matrices]
            values = DeviceValues(*where, len(matrices), [c.block for c in members if c.block is not None])
            self._values.append((values, matrices))
            parts = values.factors.split([len(chunk.matrices) for chunk in members])
            for place, chunk, part in zip(places, members, parts, strict=True):
                found[place] = _bucket(chunk, part, values)
        return [found[place] for place in range(len(chunks))]

    def prepare(self, bucket: Bucket, rows: int) -> None:
        """Make room for so many rows of a bucket: buckets of several shapes take turns in the workspace."""
        first = bucket.matrices[0]
        room = rows * self.choices[first.number].room
        limit = memory_limit(first.group["max_workspace_bytes"], first.param.device.type)
        n, m = sorted((bucket.rows, bucket.cols))
        self.workspace.prepare(rows, n, m, bucket.precision.itemsize, room, limit)

    def fits(self, groups: list[Group]) -> bool:
        """Whether these are what the plan was made from, and the state has all that it has counted."""
        params = [param for group in groups for param in group["params"]]
        return (
            groups is self.groups
            and self.key == settings_of(groups, self.method.settings)
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and self.forms == [(param.shape, param.dtype, param.device) for param in params]
            and all("counters" in self.state.get(param, ()) for param in self._begun)
            and not any("counters" in self.state.get(param, ()) for param in self._waiting)
        )

    def fill(self, step: int) -> None:
        """Bring the numbers on the devices up to date."""
        now = [
            (
                float(g["weight_decay"]),
                float(g["momentum"]),
                g["nesterov"],
                None if on_device(lr) else float(lr),
            )
            for g, lr in ((g, g["lr"]) for g in self.groups if g["use_muon"])
        ]
        changed, self._factors = now != self._factors, now
        for values, matrices in self._values:
            wanted = [factors(x) for x in matrices] if changed else None
            values.fill(wanted, step)

    def learn(self) -> list[str]:
        """Take in what earlier steps have measured. Returns what the user should know of, as warnings."""
        told: list[str] = []
        for param, tables in self._begun.items():
            self._take_over(param, tables)
        while self._sent:
            step, outcomes, numbers, present, readback = self._sent.pop(0)
            values = readback.wait()
            readings = torch.empty_like(values).index_copy_(0, numbers, values)
            if not self.schedule.learn(step, outcomes, readings):
                told.append(WARN_NON_FINITE)
            if (readings[present, 0] == MISSING).any():
                told.append(WARN_MISSING)
        return told

    def send(self, step: int, outcomes: list[int], measured: list[Readings]) -> None:
        """Let what a step has measured of all matrices begin its way to the host."""
        numbers = torch.cat([readings.order for readings in measured])
        present = [number for readings in measured for number in readings.present]
        tensors = [tensor for readings in measured for tensor in readings.tensors]
        self._sent.append((step, outcomes, numbers, present, Readback(_joined(tensors))))

    def momentum(self, x: Matrix) -> Tensor:
        """The momentum buffer of a matrix's parameter, made on first sight with what else its state needs."""
        state = self.state[x.param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(x.param, memory_format=torch.contiguous_format)
        if "counters" not in state:
            self._begun[x.param] = self._waiting.pop(x.param)
            state["counters"], state["residuals"] = self._begun[x.param]
        momentum: Tensor = state["momentum_buffer"]
        return momentum

    def kept(self, bucket: Bucket, matrices: Iterable[Matrix]) -> list[Tensor]:
        """What the orthogonalizer of a bucket keeps for each matrix; made on first sight."""
        entry = bucket.orthogonalize.entry
        if entry is None:
            return []
        found = []
        for x in matrices:
            state, name = self.state[x.param], entry_name(entry, x.index, len(x.layout.views))
            dtype = kept_dtype(x)
            if name not in state:
                shape = bucket.orthogonalize.kept_shape(*sorted((bucket.rows, bucket.cols)))
                state[name] = local(x.param).new_zeros(shape, dtype=dtype)
            elif state[name].dtype != dtype:
                state[name] = state[name].to(dtype)
            found.append(state[name])
        return found

    def entry_of(self, x: Matrix) -> str | None:
        """The name of the state entry that a matrix keeps; None if it keeps nothing."""
        entry = self.choices[x.number].orthogonalizer.entry
        return None if entry is None else entry_name(entry, x.index, len(x.layout.views))

    def _adopt(self, x: Matrix) -> None:
        """Count on from the state of a parameter, which from now on has views of the plan's counters."""
        state, number = self.state.get(x.param, {}), len(x.layout.views)
        rows = slice(x.number, x.number + number)
        tables = self.schedule.counters[rows], self.schedule.residuals[rows]
        if "counters" not in state:
            self._waiting[x.param] = tables
            return
        if len(state["counters"]) != number:
            raise ValueError(
                f"view and split must stay as they were at the first step, got {number} matrices in a "
                f"parameter of shape {tuple(x.param.shape)} whose state has {len(state['counters'])}"
            )
        self._begun[x.param] = tables
        self._take_over(x.param, tables)

    def _take_over(self, param: Tensor, tables: tuple[Tensor, Tensor]) -> None:
        """Let the state of a parameter have the plan's counters, with the values that it has: they were
        loaded, or moved to a device and back.
        """
        state = self.state.get(param, {})
        for entry, own in zip(("counters", "residuals"), tables, strict=True):
            if state.get(entry, own) is not own:
                own.copy_(state[entry])
                state[entry] = own


def _bucket(chunk: Chunk, factors: Tensor, values: DeviceValues) -> Bucket:
    first = chunk.matrices[0]
    return Bucket(
        tuple(chunk.matrices),
        *chunk.sides,
        first.param.dtype,
        first.param.device,
        chunk.choice.orthogonalizer,
        factors,
        None if chunk.block is None else values.blocks[chunk.block],
        first.group["lr"] if on_device(first.group["lr"]) else None,
        len(chunk.matrices) * chunk.choice.room,
        memory_limit(first.group["max_workspace_bytes"], first.param.device.type),
    )


def kept_dtype(x: Matrix) -> torch.dtype:
    """The dtype of what a matrix keeps."""
    chosen: torch.dtype | None = x.group.get("cache_dtype")
    return chosen or computed_in(x.param.dtype)


def weights_in(group: Group) -> tuple[float, float]:
    """The weights of momentum that a group asks for (`momentum.weights`)."""
    return weights(float(group["momentum"]), group["nesterov"])


def factors(x: Matrix) -> tuple[float, ...]:
    """`-lr ratio`, `1 - lr weight_decay`, and the weights of momentum; for an lr that lies on a device, those
    for an lr of 1.
    """
    group = x.group
    lr = 1.0 if on_device(group["lr"]) else float(group["lr"])
    outputs, inputs = x.layout.views[x.index].sides
    if group["transposed"]:
        outputs, inputs = inputs, outputs
    ratio = lr_ratio(group["adjust_lr_fn"], outputs, inputs)
    return (
        -lr * ratio,
        1 - lr * float(group["weight_decay"]),
        *weights(float(group["momentum"]), group["nesterov"]),
    )


def _joined(readings: list[Tensor]) -> Tensor:
    """Tensors of any devices as one, on one that is not the host's where there is any: a copy to the host
    that nobody waits for would be read before it has arrived.
    """
    if len(readings) == 1:
        return readings[0]
    device = next((part.device for part in readings if part.device.type != "cpu"), readings[0].device)
    return torch.cat([part.to(device, torch.float64, non_blocking=True) for part in readings])
