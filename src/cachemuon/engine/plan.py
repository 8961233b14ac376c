"""The plan of an optimizer: its matrices in buckets, and all that a step needs beside their state.

It is a pure function of parameter groups and state, and is made again when these are not what it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..newton_schulz.normalize import computed_in
from ..newton_schulz.workspace import Workspace, ceiling
from ..report.counters import FIRST, HIT, OUTCOMES, entry_name
from ..routing.layout import MatrixView, layout_of
from .bucket import Bucket, Matrix, local
from .momentum import lr_ratio, weights
from .orthogonalize import Orthogonalizer
from .readings import Readings
from .schedule import MISSING, Life, Schedule
from .transfer import Block, DeviceValues, Readback

State = dict[Tensor, dict[str, Any]]
Group = dict[str, Any]


WARN_NON_FINITE = (
    "a gradient has a NaN or Inf: that matrix, its momentum and its transform were left as they were for the "
    "step; cache_stats() counts such steps as 'non-finite'. This is said once."
)
WARN_MISSING = (
    "a parameter has a gradient on some ranks and none on others: no rank steps it. This is said once."
)


class Prices(NamedTuple):
    """FLOPs of one matrix by outcome: as executed, as the paper counts, and on a rank that has a copy and does
    not own it; an outcome that is missing costs nothing. `solve` is the cheapest fresh solve.
    """

    executed: dict[str, int]
    paper: dict[str, int]
    copy: dict[str, int]
    solve: int


class Choice(NamedTuple):
    """What is to be done with one kind of matrix.

    `room` are the bytes that each takes in a batch; `why` tells why there is no cache.
    """

    orthogonalizer: Orthogonalizer
    life: Life
    room: int
    prices: Prices
    block: Block | None = None
    why: str = ""

    @property
    def every_step(self) -> int:
        """The FLOPs that a matrix takes at every step."""
        always = HIT if self.life.always is None else self.life.always
        return self.prices.executed.get(OUTCOMES[always], 0)

    @property
    def refresh(self) -> int:
        """The FLOPs that a refresh adds."""
        if self.life.always is not None:
            return 0
        return self.prices.executed.get(OUTCOMES[FIRST], 0) - self.every_step


class Method(Protocol):
    """What an optimizer adds to momentum and update: how its matrices are orthogonalized."""

    settings: tuple[str, ...]
    """The settings of a group that matrices of one bucket share; another plan is made when one changes."""

    def choose(self, group: Group, param: Tensor, view: MatrixView, count: int) -> Choice:
        """For a matrix of a parameter, of whose kind there are `count`."""


@dataclass(eq=False)
class Kind:
    """Matrices of one shape, dtype, device and settings; which ranks share them; and what is done with them."""

    matrices: list[Matrix]
    ranks: tuple[int, ...]
    choice: Choice
    phases: list[int]


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
        ranks_of: Callable[[Group, Tensor], tuple[int, ...]] = lambda group, param: (),
    ) -> None:
        self.groups, self.state, self.method = groups, state, method
        self.key = _key(groups, method.settings)
        self.params = [param for group in groups for param in group["params"]]
        self.forms = [(param.shape, param.dtype, param.device) for param in self.params]
        self.device_types = {param.device.type for param in self.params}
        self.workspace = Workspace()
        self.matrices = list(_matrices(groups))
        self.kinds = list(self._kinds(ranks_of))
        self.choices: dict[int, Choice] = {}  # by the matrix's number
        phases: dict[int, int] = {}
        for kind in self.kinds:
            for x, phase in zip(kind.matrices, kind.phases, strict=True):
                self.choices[x.number], phases[x.number] = kind.choice, phase
        lives = [self.choices[x.number].life._replace(phase=phases[x.number]) for x in self.matrices]
        self.schedule = Schedule(lives)
        self._values: list[tuple[DeviceValues, list[Matrix]]] = []
        self._factors: Any = None
        self._sent: list[tuple[int, list[int], list[int], list[int], Readback]] = []
        self._counters: dict[Tensor, Tensor] = {}  # what the state of each parameter has to have
        for x in self.matrices:
            if x.index == 0:
                self._adopt(x)

    def _kinds(self, ranks_of: Callable[[Group, Tensor], tuple[int, ...]]) -> Iterator[Kind]:
        alike: dict[Any, list[Matrix]] = {}
        for x in self.matrices:
            lr = x.group["lr"]
            shared = tuple(x.group[name] for name in self.method.settings)
            key = x.layout.views[x.index].sides, x.param.dtype, x.param.device, shared
            alike.setdefault((ranks_of(x.group, x.param), key, id(lr) if on_device(lr) else 0), []).append(x)
        due: dict[tuple[tuple[int, ...], int | None], list[Kind]] = {}
        for (ranks, *_), matrices in alike.items():
            first = matrices[0]
            view = first.layout.views[first.index]
            choice = self.method.choose(first.group, first.param, view, len(matrices))
            kind = Kind(matrices, ranks, choice, [0] * len(matrices))
            if choice.refresh:
                due.setdefault((ranks, choice.life.max_age), []).append(kind)
            yield kind
        for (_, max_age), kinds in due.items():
            if max_age is None:  # never due
                continue
            costs = [kind.choice.refresh for kind in kinds for _ in kind.matrices]
            phases = iter(spread(costs, max_age + 1))
            for kind in kinds:
                kind.phases = [next(phases) for _ in kind.matrices]

    def chunks(
        self, kind: Kind, matrices: list[Matrix], share: int = 1, piece: tuple[int, int] | None = None
    ) -> list[Chunk]:
        """Matrices of a kind in their order, as many together as fit a share of `max_workspace_bytes`.

        `piece` are the sides of what this rank has of each, where that is not all.
        """
        first = matrices[0]
        limit = ceiling(first.group["max_workspace_bytes"], first.param.device.type) // share
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

    def fits(self, groups: list[Group], state: State) -> bool:
        """Whether these are what the plan was made from."""
        params = [param for group in groups for param in group["params"]]
        return (
            groups is self.groups
            and state is self.state
            and self.key == _key(groups, self.method.settings)
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and self.forms == [(param.shape, param.dtype, param.device) for param in params]
            and all(
                state[param].get("counters", own) is own
                for param, own in self._counters.items()
                if param in state
            )
        )

    def fill(self, step: int) -> None:
        """Bring the numbers on the devices up to date."""
        now = [
            (None if on_device(g["lr"]) else float(g["lr"]), *map(float, (g["weight_decay"], g["momentum"])))
            for g in self.groups
            if g["use_muon"]
        ]
        changed, self._factors = now != self._factors, now
        for values, matrices in self._values:
            wanted = [factors(x) for x in matrices] if changed else None
            values.fill(wanted, step)

    def learn(self) -> list[str]:
        """Take in what earlier steps have measured. Returns what the user should know of, as warnings."""
        told: list[str] = []
        while self._sent:
            step, numbers, outcomes, present, readback = self._sent.pop(0)
            values = readback.wait()
            if not self.schedule.learn(step, numbers, outcomes, values):
                told.append(WARN_NON_FINITE)
            if present and any(values[[numbers.index(x) for x in present], 0] == MISSING):
                told.append(WARN_MISSING)
        return told

    def send(self, step: int, outcomes: list[int], measured: list[Readings]) -> None:
        """Let what a step has measured begin its way to the host."""
        numbers = [number for readings in measured for number in readings.numbers]
        wanted = [outcomes[number] for number in numbers]
        present = [number for readings in measured for number in readings.present]
        tensors = [tensor for readings in measured for tensor in readings.tensors]
        if numbers:
            self._sent.append((step, numbers, wanted, present, Readback(_joined(tensors))))

    def momentum(self, x: Matrix) -> Tensor:
        """The momentum buffer of a matrix's parameter, made on first sight with what else its state needs."""
        state = self.state[x.param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(x.param, memory_format=torch.contiguous_format)
        if "counters" not in state:
            first, number = x.number - x.index, len(x.layout.views)
            state["counters"] = self._counters[x.param]
            state["residuals"] = self.schedule.residuals[first : first + number]
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

    def _adopt(self, x: Matrix) -> None:
        """Take over the counters of a parameter: from now on its state has views of the plan's."""
        state, number = self.state.get(x.param, {}), len(x.layout.views)
        for entry, table in (("counters", self.schedule.counters), ("residuals", self.schedule.residuals)):
            own = table[x.number : x.number + number]
            if entry == "counters":
                self._counters[x.param] = own
            if entry not in state:
                continue
            if len(state[entry]) != number:
                raise ValueError(
                    f"view and split must stay as they were at the first step, got {number} matrices in a "
                    f"parameter of shape {tuple(x.param.shape)} whose state has {len(state[entry])}"
                )
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
    )


def entry_of(plan: Plan, x: Matrix) -> str | None:
    """The name of the state entry that a matrix keeps; None if it keeps nothing."""
    entry = plan.choices[x.number].orthogonalizer.entry
    return None if entry is None else entry_name(entry, x.index, len(x.layout.views))


def kept_dtype(x: Matrix) -> torch.dtype:
    """The dtype of what a matrix keeps."""
    chosen: torch.dtype | None = x.group.get("cache_dtype")
    return chosen or computed_in(x.param.dtype)


def factors(x: Matrix) -> tuple[float, float, float, float]:
    """`-lr ratio`, `1 - lr weight_decay`, and the weights of momentum; for an lr that lies on a device, those
    for an lr of 1.
    """
    group = x.group
    lr = 1.0 if on_device(group["lr"]) else float(group["lr"])
    outputs, inputs = x.layout.views[x.index].sides
    if group["transposed"]:
        outputs, inputs = inputs, outputs
    ratio = lr_ratio(group["adjust_lr_fn"], outputs, inputs)
    return -lr * ratio, 1 - lr * float(group["weight_decay"]), *weights(float(group["momentum"]), group["nesterov"])


def spread(weights: list[int], places: int) -> list[int]:
    """A place for each weight, in their order, so that all places have about the same sum.

    >>> spread([3, 3, 1, 1, 1, 1, 1, 1], 4)
    [0, 1, 2, 2, 2, 3, 3, 3]
    """
    total, before, found = sum(weights), 0, []
    for weight in weights:
        found.append((2 * before + weight) * places // (2 * total))  # where its middle lies
        before += weight
    return found


def on_device(value: Any) -> bool:
    """Whether a setting is a tensor that lies on a device, and must not be read."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _matrices(groups: list[Group]) -> Iterator[Matrix]:
    number = 0
    for group in groups:
        for param in group["params"] if group["use_muon"] else ():
            if param.numel():  # others are never stepped
                layout = layout_of(group, param)
                for index in range(len(layout.views)):
                    yield Matrix(param, group, layout, index, number)
                    number += 1


def _key(groups: list[Group], settings: tuple[str, ...]) -> list[Any]:
    """What a plan depends on beside the parameters themselves."""
    names = (*settings, "view", "split", "transposed", "max_workspace_bytes", "adjust_lr_fn", "process_group")
    return [
        (*(group[name] for name in names), id(group["lr"]) if on_device(group["lr"]) else 0)
        for group in groups
        if group["use_muon"]
    ]


def _joined(readings: list[Tensor]) -> Tensor:
    """Tensors of any devices as one, on one that is not the host's where there is any: a copy to the host that
    nobody waits for would be read before it has arrived.
    """
    if len(readings) == 1:
        return readings[0]
    device = next((part.device for part in readings if part.device.type != "cpu"), readings[0].device)
    return torch.cat([part.to(device, torch.float64, non_blocking=True) for part in readings])
