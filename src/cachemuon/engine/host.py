"""What crosses between host and device in a step: one upload, and one reading at most.

`torch.tensor(list, device=...)`, `.item()`, `tolist` of a tensor on a device and copies to the host make the
host wait until the device has done all its work. Whatever a step knows on the host goes to the device in one
copy from pinned memory; whatever it must read is read in `read`, or arrives beside other work (`Readback`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from ..newton_schulz.workspace import Workspace
from ..report.counters import skipped


def read(values: Tensor) -> list[Any]:
    """A tensor as a list. The one place where a step may wait for a device."""
    return list(values.tolist())


def upload(wanted: Mapping[Hashable, tuple[Tensor, torch.device]]) -> dict[Hashable, Tensor]:
    """Tensors of the host on the devices they are wanted on, by one copy to each, which nobody waits for.

    >>> upload({"lr": (torch.tensor([0.1]), torch.device("cpu"))})
    {'lr': tensor([0.1000])}
    """
    found: dict[Hashable, Tensor] = {}
    on: dict[torch.device, list[Hashable]] = {}
    for key, (values, device) in wanted.items():
        if device.type == "cpu":
            found[key] = values
        else:
            on.setdefault(device, []).append(key)
    for device, keys in on.items():
        parts = [wanted[key][0] for key in keys]
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
        # Of its own at every step: torch's allocator gives it away again only when the copy is done.
        pinned = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device="cpu", pin_memory=True)
        torch.cat([part.to(dtype).flatten() for part in parts], out=pinned)
        there = pinned.to(device, non_blocking=True).split([part.numel() for part in parts])
        for key, part, copied in zip(keys, parts, there, strict=True):
            found[key] = copied.view(part.shape).to(part.dtype)
    return found


class Readback:
    """A small tensor on its way to the host; nobody has to wait for it.

    >>> Readback(torch.tensor([1.0, 2.0])).wait()
    [1.0, 2.0]
    """

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._arrived: torch.Event | None = None
        if values.device.type != "cpu":
            self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            # On the stream of the copy, that of the tensor's device, whichever device is the current one.
            self._arrived = torch.Event(values.device)
            self._arrived.record(torch.accelerator.current_stream(values.device))

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> list[Any]:
        """The values as a list, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return read(self._host)


def together(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Tensors of any devices as one, on one that is not the host's where there is any: a copy to the host
    that nobody waits for would be read before it has arrived.

    >>> together([torch.tensor([True]), torch.tensor([0.5])], torch.float32)
    tensor([1.0000, 0.5000])
    """
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    return torch.cat([part.to(device, dtype, non_blocking=True) for part in parts])


class Ledger:
    """Tensors of the state that the host knows by heart, and so need not be read at every step.

    A tensor that was replaced or written to since then, as by `load_state_dict`, is read again.

    >>> ledger, counters = Ledger(), torch.zeros(1, 2)
    >>> ledger.post([counters], [[[1.0, 2.0]]])
    >>> ledger.rows(counters), counters
    ([[1.0, 2.0]], tensor([[1., 2.]]))
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, list[list[Any]]]] = {}

    def rows(self, tensor: Tensor) -> list[list[Any]]:
        """The rows of a tensor of two dimensions."""
        known, version, rows = self._known.get(id(tensor), (None, 0, []))
        if known is tensor and version == tensor._version:
            return rows
        rows = read(tensor)
        self.learn(tensor, tensor._version, rows)
        return rows

    def learn(self, tensor: Tensor, version: int, rows: list[list[Any]]) -> None:
        """These were the rows of a tensor at that version of it."""
        self._known[id(tensor)] = tensor, version, rows

    def post(self, tensors: list[Tensor], rows: list[list[list[Any]]]) -> None:
        """Write these rows into the tensors, which are on the host."""
        written = torch.tensor([row for part in rows for row in part], dtype=tensors[0].dtype, device="cpu")
        torch._foreach_copy_(tensors, list(written.split([len(part) for part in rows])))
        for tensor, part in zip(tensors, rows, strict=True):
            self.learn(tensor, tensor._version, part)


class Edits:
    """Rows that are changed one by one, and written into their tensors together."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed: dict[int, tuple[Tensor, list[list[Any]]]] = {}

    def rows(self, tensor: Tensor) -> list[list[Any]]:
        """The rows of a tensor, to be changed."""
        if id(tensor) not in self._changed:
            self._changed[id(tensor)] = tensor, [list(row) for row in self._ledger.rows(tensor)]
        return self._changed[id(tensor)][1]

    def post(self) -> None:
        """Write what was changed."""
        if self._changed:
            tensors, rows = zip(*self._changed.values(), strict=True)
            self._ledger.post(list(tensors), list(rows))


@dataclass(slots=True, eq=False)
class Claim:
    """That a matrix took a step, its counters going from `before` to `after`, unless its gradient was not
    finite, which only the device knows yet; and that these columns of its residuals are then a number that is
    on its way too.
    """

    state: dict[str, Any]
    index: int
    before: list[int]
    after: list[int]
    columns: tuple[int, ...] = ()

    @property
    def numbers(self) -> int:
        """How many residuals are on their way."""
        return 1 if self.columns else 0

    def settle(self, finite: bool, numbers: list[float], counters: Edits, residuals: Edits) -> None:
        """Write down what has arrived."""
        if not finite:
            rows = counters.rows(self.state["counters"])
            rows[self.index] = skipped(rows[self.index], self.before, self.after)
            return
        for column in self.columns:
            residuals.rows(self.state["residuals"])[self.index][column] = numbers[0]


class Pending(Protocol):
    """What waits for readings: `Claim`, or what another rank decides."""

    @property
    def numbers(self) -> int:
        """How many residuals are on their way."""

    def settle(self, finite: bool, numbers: list[float], counters: Edits, residuals: Edits) -> None:
        """Write down what has arrived."""


@dataclass
class Kept:
    """What an optimizer keeps beside its state, and makes anew after it was copied, pickled or loaded."""

    workspace: Workspace = field(default_factory=Workspace)
    counters: Ledger = field(default_factory=Ledger)
    residuals: Ledger = field(default_factory=Ledger)
    sent: list[tuple[Readback, Sequence[Pending]]] = field(default_factory=list)
    plan: Any = None
    differing: set[tuple[int, ...]] = field(default_factory=set)  # ranks that plan what they share apart
    homes: Any = None
    parties: dict[tuple[int, ...], Any] = field(default_factory=dict)
    reconciled: bool = False  # with other ranks, since groups, settings or state are what they are
    warned: set[str] = field(default_factory=set)
    told: dict[str, list[int]] = field(default_factory=dict)  # what the last metrics() had counted

    def send(self, claims: Sequence[Pending], finite: list[Tensor], residuals: list[Tensor]) -> None:
        """Send to the host, in the order of the claims, which of them hold, and the residuals that they wait
        for.
        """
        parts = [*finite, *residuals]
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
        self.sent.append((Readback(together(parts, dtype)), claims))

    def settle(self, *, wait: bool) -> bool:
        """Mend the claims that did not hold, and write down the residuals; unless they have not arrived and
        we do not wait. Returns whether all claims held.
        """
        held = True
        while self.sent and (wait or self.sent[0][0].arrived):
            readback, claims = self.sent.pop(0)
            values = iter(readback.wait())
            finites = [bool(next(values)) for _ in claims]
            held = held and all(finites)
            counters, residuals = Edits(self.counters), Edits(self.residuals)
            for claim, finite in zip(claims, finites, strict=True):
                numbers = [float(next(values)) for _ in range(claim.numbers)]
                claim.settle(finite, numbers, counters, residuals)
            counters.post()
            residuals.post()
        return held
