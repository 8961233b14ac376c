"""The plan of an optimizer: its matrices in buckets, and all that a step needs beside their state.

It is a pure function of parameter groups and state, and is made again when these are not what it was made
from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..newton_schulz.normalize import computed_in
from ..newton_schulz.products import Workspace
from ..newton_schulz.workspace import memory_limit
from ..report.counters import entry_name
from .bucket import Bucket, Choice, Group, Kind, Matrix, Method, RanksOf, kinds_of, local, matrices_of
from .schedule import MISSING, Block, DeviceValues, Readings, Schedule, on_device, read_back

State = dict[Tensor, dict[str, Any]]

WARN_NON_FINITE = (
    "a gradient has a NaN or Inf: that matrix, its momentum and its transform were left as they were for the "
    "step; cache_stats() counts such steps as 'non-finite'. This is said once."
)
WARN_MISSING = (
    "a parameter has a gradient on some ranks and none on others: no rank steps it. This is said once."
)


LAYOUT = ("view", "split", "transposed", "max_workspace_bytes", "adjust_lr_fn", "process_group")
"""Settings that another plan is made for, beside those of the method."""

ADJUST_LR_FNS = ("none", "original", "match_rms_adamw")


@cache
def lr_ratio(adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    """The factor on the learning rate of a rows x cols matrix.

    "none": 1. "original": `sqrt(max(1, rows / cols))`. "match_rms_adamw": `0.2 sqrt(max(rows, cols))`.
    None means "original", as in torch.optim.Muon.

    >>> lr_ratio("none", 400, 100), lr_ratio("original", 400, 100), lr_ratio("match_rms_adamw", 400, 100)
    (1.0, 2.0, 4.0)
    """
    if adjust_lr_fn == "none":
        return 1.0
    if adjust_lr_fn in (None, "original"):
        return math.sqrt(max(1, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))


def factors(x: Matrix) -> tuple[float, float, float, float]:
    """`-lr ratio`, `1 - lr weight_decay`, and the weights of momentum: that of the gradient in U, which is
    orthogonalized, and of `U - M` in the momentum. For an lr that lies on a device, those for an lr of 1.

    With `M' = b M + (1 - b) G` Nesterov orthogonalizes `U = b M' + (1 - b) G = M + (1 - b^2) (G - M)`, and so
    `M' = M + (U - M) / (1 + b)`: M' needs no second look at G.
    """
    group, momentum = x.group, float(x.group["momentum"])
    lr = 1.0 if on_device(group["lr"]) else float(group["lr"])
    outputs, inputs = x.layout.views[x.index].sides
    if group["transposed"]:
        outputs, inputs = inputs, outputs
    ratio = lr_ratio(group["adjust_lr_fn"], outputs, inputs)
    weights = (1 - momentum**2, 1 / (1 + momentum)) if group["nesterov"] else (1 - momentum, 1.0)
    return -lr * ratio, 1 - lr * float(group["weight_decay"]), *weights


def kept_dtype(x: Matrix) -> torch.dtype:
    """The dtype of a matrix's transform, and of other compact entries."""
    chosen: torch.dtype | None = x.group.get("cache_dtype")
    return chosen or computed_in(x.param.dtype)


@dataclass(eq=False)
class Chunk:
    """Matrices that will be a bucket: wholes with a random `block`, or what a rank has of them."""

    matrices: list[Matrix]
    sides: tuple[int, int]
    choice: Choice
    block: Block | None


class Plan:
    """See above. `kinds` are all matrices, `choices` what is done with each, by its number."""

    def __init__(
        self,
        groups: list[Group],
        state: State,
        method: Method,
        ranks_of: RanksOf = lambda group, param: (),
    ) -> None:
        self.groups, self.state, self.method = groups, state, method
        self.params = [param for group in groups for param in group["params"]]
        self.device_types = {param.device.type for param in self.params}
        self.workspace = Workspace()
        self.matrices = list(matrices_of(groups))
        self.kinds = kinds_of(self.matrices, method, ranks_of)
        self.choices: dict[int, Choice] = {}
        phases: dict[int, int] = {}
        for kind in self.kinds:
            for x, phase in zip(kind.matrices, kind.phases, strict=True):
                self.choices[x.number], phases[x.number] = kind.choice, phase
        lives = [self.choices[x.number].life._replace(phase=phases[x.number]) for x in self.matrices]
        self.schedule = Schedule(lives)
        self._made_from: list[Any] = []
        self._numbers = torch.empty(0, device="cpu")  # of matrices, in the order of readings
        self._values: list[tuple[DeviceValues, list[Matrix]]] = []
        self._filled: list[Any] = []  # the settings that the factors on the devices were made from
        self._sent: list[tuple[int, list[int], list[int], Tensor, torch.Event | None]] = []
        self._names: dict[int, dict[str, str]] = {}  # of state entries, by matrix and entry
        # Counters and residuals of each parameter, before its state has them, and after.
        self._waiting: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._begun: dict[Tensor, tuple[Tensor, Tensor]] = {}
        for x in self.matrices:
            if x.index == 0:
                self._adopt(x)
        self.fits(groups)

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
        self._filled = []
        return [found[place] for place in range(len(chunks))]

    def fits(self, groups: list[Group]) -> bool:
        """Whether these are what the plan was made from, and the state has all that it has counted."""
        names = *self.method.settings, *LAYOUT
        params = [param for group in groups for param in group["params"]]
        now = [(param.shape, param.dtype, param.device) for param in params]
        now += [
            (*[group[name] for name in names], 0 if getattr(group["lr"], "is_cpu", True) else id(group["lr"]))
            for group in groups
            if group["use_muon"]
        ]
        if not self._made_from:
            self._made_from = now
        return (
            groups is self.groups
            and now == self._made_from
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and all("counters" in self.state.get(param, ()) for param in self._begun)
            and not any("counters" in self.state.get(param, ()) for param in self._waiting)
        )

    def fill(self, step: int) -> None:
        """Bring the numbers on the devices up to date."""
        now = [
            (*[float(group[name]) for name in ("weight_decay", "momentum", "nesterov")], lr)
            for group in self.groups
            if group["use_muon"]
            for lr in (float(group["lr"]) if getattr(group["lr"], "is_cpu", True) else None,)
        ]
        changed, self._filled = now != self._filled, now
        for values, matrices in self._values:
            values.fill([factors(x) for x in matrices] if changed else None, step)

    def learn(self) -> list[str]:
        """Take in what earlier steps have measured. Returns what the user should know of, as warnings."""
        told: list[str] = []
        for param, (counters, residuals) in self._begun.items():
            state = self.state.get(param, {})
            if (
                state.get("counters", counters) is not counters
                or state.get("residuals", residuals) is not residuals
            ):
                self._take_over(param, (counters, residuals))
        while self._sent:
            step, outcomes, present, values, arrived = self._sent.pop(0)
            if arrived is not None:
                arrived.synchronize()
            readings = torch.empty_like(values, dtype=torch.float64)
            readings.index_copy_(0, self._numbers, values.to(torch.float64))
            if not self.schedule.learn(step, outcomes, readings):
                told.append(WARN_NON_FINITE)
            if present and (readings[present, 0] == MISSING).any():
                told.append(WARN_MISSING)
        return told

    def send(self, step: int, outcomes: list[int], measured: list[Readings]) -> None:
        """Let what a step has measured of all matrices begin its way to the host."""
        if not len(self._numbers):
            self._numbers = torch.tensor([number for one in measured for number in one.numbers], device="cpu")
        present = [number for one in measured for number in one.present]
        values, *more = [tensor for one in measured for tensor in one.tensors]
        if more:
            # On a device that is not the host's, where there is any: a copy to the host that nobody waits for
            # would be read before it has arrived.
            parts = [values, *more]
            device = next((part.device for part in parts if part.device.type != "cpu"), values.device)
            values = torch.cat([part.to(device, torch.float64, non_blocking=True) for part in parts])
        self._sent.append((step, outcomes, present, *read_back(values)))

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

    def entries_of(self, x: Matrix) -> dict[str, str]:
        """The names in the state of what a matrix keeps for its directions, by entry."""
        if x.number not in self._names:
            entries = self.choices[x.number].entries(*x.layout.views[x.index].sides)
            self._names[x.number] = {one: entry_name(one, x.index, len(x.layout.views)) for one in entries}
        return self._names[x.number]

    def kept(self, bucket: Bucket, matrices: list[Matrix]) -> dict[str, list[Tensor]]:
        """What each matrix keeps for the directions of a bucket, by entry; made on first sight."""
        found: dict[str, list[Tensor]] = {entry: [] for entry in bucket.entries}
        for x in matrices if found else ():
            state = self.state[x.param]
            for entry, name in (self._names.get(x.number) or self.entries_of(x)).items():
                shape, compact = bucket.entries[entry]
                dtype = bucket.compact if compact else bucket.precision
                if name not in state or state[name].shape != shape:  # another `normalize` has other moments
                    state[name] = local(x.param).new_zeros(shape, dtype=dtype)
                elif state[name].dtype != dtype:
                    state[name] = state[name].to(dtype)
                found[entry].append(state[name])
        return found

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
    first, sides = chunk.matrices[0], chunk.sides
    return Bucket(
        tuple(chunk.matrices),
        *sides,
        sides[0] > sides[1],
        first.param.dtype,
        computed_in(first.param.dtype),
        kept_dtype(first),
        first.param.device,
        chunk.choice.orthogonalizer,
        chunk.choice.normalization,
        chunk.choice.entries(*sides),
        factors,
        None if chunk.block is None else values.blocks[chunk.block],
        first.group["lr"] if on_device(first.group["lr"]) else None,
        len(chunk.matrices) * chunk.choice.room,
        memory_limit(first.group["max_workspace_bytes"], first.param.device.type),
    )
