"""Several trainings at a time, each in a process of its own with one thread on the CPU.

On few cores that is faster than one training after another with all threads: matrices of a small model are
too small to share.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from cachemuon_lab.config import RunConfig
from cachemuon_lab.record import Run
from cachemuon_lab.train import Interrupted, interrupts, train

State = dict[str, Any]
POLL_S = 0.1
"""Seconds between two looks at the workers."""

_messages: multiprocessing.Queue[tuple[str, State]]  # a worker's way to tell its progress
_halt: Event  # of all workers: stop after this step, and begin nothing more


def train_side_by_side(
    configs: Mapping[str, RunConfig],
    out: Path,
    workers: int,
    tell: Callable[[str, State], None],
    stop: Callable[[], bool] | None = None,
) -> dict[str, Run]:
    """Train all of them, each in the folder of its name, so many at a time; return the finished runs.

    As with `train`, finished runs are read and unfinished ones resumed. Ctrl-C, `stop` or an error in one of
    them ends all after their current steps, with checkpoints.
    """
    context = multiprocessing.get_context("spawn")
    messages, halt = context.Queue(), context.Event()
    with ProcessPoolExecutor(workers, context, _begin, (messages, halt)) as pool, interrupts() as pressed:
        asked = {name: pool.submit(_train, name, config, out / name) for name, config in configs.items()}
        waiting: set[Future[tuple[Path, int] | None]] = set(asked.values())
        while waiting:
            ended, waiting = wait(waiting, POLL_S)
            _pass_on(messages, tell)
            failed = any(future.exception() is not None for future in ended)
            if failed or pressed() or (stop is not None and stop()):
                halt.set()
        _pass_on(messages, tell)
    try:
        stopped = [future.result() for future in asked.values()]
    except BrokenProcessPool:
        raise OSError(
            "a training process died, perhaps for want of memory; the same command goes on with its run"
        ) from None
    for where in stopped:
        if where is not None:
            raise Interrupted(*where)
    return {name: Run.open(out / name) for name in configs}


def _pass_on(messages: multiprocessing.Queue[tuple[str, State]], tell: Callable[[str, State], None]) -> None:
    while True:
        try:
            name, state = messages.get_nowait()
        except queue.Empty:
            return
        tell(name, state)


def _begin(messages: multiprocessing.Queue[tuple[str, State]], halt: Event) -> None:
    """Make this process a worker: one thread, and no life beyond that of the process that it works for."""
    global _messages, _halt
    _messages, _halt = messages, halt
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it, and halts all
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)  # the run's folder is whole at any moment


def _train(name: str, config: RunConfig, folder: Path) -> tuple[Path, int] | None:
    """Train one of them to its end, or return where it stopped; step 0 if it did not begin."""
    if _halt.is_set():
        return folder, 0

    def tell(state: State) -> None:
        _messages.put((name, state))

    try:
        train(config, folder, resume=True, device="cpu", on_progress=tell, stop=_halt.is_set)
    except Interrupted as reason:
        return reason.folder, reason.step
    return None
