"""What the longer benchmarks share: many trainings in one folder, a search for learning rates, a command."""

from __future__ import annotations

import argparse
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context, parent_process
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from ledger import Finished, Ledger

from cachemuon_lab import drawing
from cachemuon_lab.config import OptimizerConfig, RunConfig
from cachemuon_lab.performance import Cells, renew
from cachemuon_lab.train import Interrupted, train

OFTEN = 60.0  # seconds between two lines of a run


class Stopped(Exception):
    """Not everything is done yet; what is done is kept."""

    def __init__(self, out: Path) -> None:
        super().__init__(f"stopped; the same command goes on with the runs in {out}")


class Trainings:
    """The runs of a folder: so many at a time, each in a process with one thread.

    Finished ones are read, from the folder or from the `ledger`, which gets a line for each; unfinished ones
    go on. Ctrl-C, the end of `minutes`, or of this process, stops all at their next step.
    """

    def __init__(
        self, out: Path, *, workers: int = 2, minutes: float = math.inf, ledger: Path | None = None
    ) -> None:
        self.out, self.deadline, self.ledger = out, time.time() + 60 * minutes, Ledger(ledger)
        context = get_context("spawn")
        self.halt = context.Event()
        self.pool = ProcessPoolExecutor(workers, context, _begin, (self.halt,))

    def run(self, configs: Mapping[str, RunConfig]) -> dict[str, Finished]:
        """Train all of them, each in the folder of its name."""
        found = {name: self.ledger.find(name, config) for name, config in configs.items()}
        asked = {
            self.pool.submit(_trained, config, self.out / name, self.deadline): name
            for name, config in configs.items()
            if found[name] is None
        }
        try:
            for ended in as_completed(asked):
                name, finished = asked[ended], ended.result()
                found[name] = finished
                if finished is not None:
                    self.ledger.add(name, configs[name], finished)
        except KeyboardInterrupt:
            self._stop()
            raise Stopped(self.out) from None
        except BaseException:  # of one of them: the others are left with a checkpoint
            self._stop()
            raise
        done = {name: finished for name, finished in found.items() if finished is not None}
        if len(done) < len(configs):
            raise Stopped(self.out)
        return done

    def _stop(self) -> None:
        """Each run ends at its next step, with a checkpoint; what waits does not begin."""
        self.halt.set()
        self.pool.shutdown(cancel_futures=True)


_busy = threading.Lock()  # while a worker trains
_halt: Event  # of all workers: none shall train any more


def _begin(halt: Event) -> None:
    """A worker has one thread, and ends with the process that it works for, even if that is killed."""
    global _halt
    _halt = halt
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
    _halt.set()
    with _busy:
        os._exit(1)


def _trained(config: RunConfig, folder: Path, deadline: float) -> Finished | None:
    """Train until the end; None where it stopped before: by Ctrl-C, at that time of day, or left alone."""
    if _halt.is_set():
        return None
    told = time.time()

    def show(at: dict[str, Any]) -> None:
        nonlocal told
        if at["step"] == at["steps"] or time.time() > told + OFTEN:
            told = time.time()
            seen = "" if at["validation"] is None else f", validation loss {at['validation']:.4f}"
            steps = f"{at['step']} of {at['steps']} steps, {at['seconds_per_step']:.2g} s each"
            print(f"{folder.name}: {steps}{seen}", flush=True)

    def stop() -> bool:
        return time.time() > deadline or _halt.is_set()

    with _busy:
        try:
            return Finished.of(train(config, folder, resume=True, on_progress=show, stop=stop))
        except Interrupted:
            _halt.set()  # nor what waits behind it
            return None


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "gram": ("GramMuon", {}),
    "jordan": ("Muon (Jordan)", {"kind": "jordan"}),
    "normuon": ("NorMuon", {"normalize": "rows"}),
    "gram-factored": ("GramMuon, factored", {"normalize": "factored"}),
    "cache-none": ("CacheMuon, normalize=None", {"kind": "cache", "normalize": None}),
    "cache": ("CacheMuon", {"kind": "cache"}),
}
"""A name for people, and what makes it of GramMuon."""


def method_of(name: str, lr: float, shared: OptimizerConfig) -> OptimizerConfig:
    """One of `METHODS` at a learning rate, with the settings that all share."""
    return replace(shared, lr=lr, **METHODS[name][1])


def line_of(name: str) -> dict[str, Any]:
    """How one of `METHODS` is drawn: its optimizer's color; dotted without normalization."""
    one = method_of(name, 1.0, OptimizerConfig("gram"))
    plain = None if one.kind == "cache" else "default"
    return {"color": drawing.colour(one), "ls": ":" if one.normalize == plain else "-"}


def climb(
    ladder: Sequence[float],
    first: Mapping[str, Iterable[int]],
    losses_of: Callable[[list[tuple[str, float]]], Iterable[float]],
) -> dict[str, dict[float, float]]:
    """For each kind its losses by learning rate, of which the lowest has worse ones on both sides.

    Or is at an end of the ladder. The search begins at the places `first`; `losses_of` trains several kinds
    with a rate each.
    """
    losses: dict[str, dict[float, float]] = {kind: {} for kind in first}
    places = dict(first)
    while wanted := [
        (kind, ladder[place])
        for kind, found in places.items()
        for place in found
        if ladder[place] not in losses[kind]
    ]:
        for (kind, rate), loss in zip(wanted, losses_of(wanted), strict=True):
            losses[kind][rate] = loss
        for kind, found in losses.items():
            best = ladder.index(best_of(found))
            places[kind] = range(max(best - 1, 0), min(best + 2, len(ladder)))
    return {kind: dict(sorted(found.items())) for kind, found in losses.items()}


def best_of(losses: Mapping[float, float]) -> float:
    """The learning rate with the lowest loss."""
    return min(losses, key=lambda rate: losses[rate])


def searched_table(searched: Mapping[str, Mapping[float, float]]) -> Cells:
    """What `climb` found: a row for each method, a column for each learning rate."""
    rates = sorted({rate for found in searched.values() for rate in found})
    cells = [["", *(f"{rate:g}" for rate in rates)]]
    for name, found in searched.items():
        cells.append([METHODS[name][0], *(f"{found[rate]:.4f}" if rate in found else "" for rate in rates)])
    return cells


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """Where the runs are, how many go at a time, for how long, and the pages whose tables are renewed."""
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path(out))
    parser.add_argument("--workers", type=int, metavar="N", default=2, help="runs at a time")
    parser.add_argument(
        "--minutes", type=float, metavar="N", default=math.inf, help="stop after so long; call again to go on"
    )
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="finished runs, from any machine")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", action="append", default=[], help="renew this page's tables"
    )


def trainings_of(args: argparse.Namespace) -> Trainings:
    """The runs that these arguments ask for."""
    return Trainings(args.out, workers=args.workers, minutes=args.minutes, ledger=args.ledger)


def tell(made: Mapping[str, tuple[str, Cells]], pages: Iterable[Path]) -> None:
    """Print tables, and write them into the pages that have a place for them."""
    for _, cells in made.values():
        print("\n".join("  ".join(f"{cell:>18}" for cell in row) for row in cells))
    renew(pages, made)
