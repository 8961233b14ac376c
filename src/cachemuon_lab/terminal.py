"""What the command shows: progress, tables and lines, on a terminal and elsewhere."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

BARS = 8  # shown at a time; a sweep has 36
LINES = 10  # for a run, where there is no terminal


@contextmanager
def processes() -> Iterator[bool]:
    """Join the processes that torchrun started, if it did; whether this is the one that prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    from cachemuon.distributed.rank_group import name_dead_ranks

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # After a restart torchrun's store still has the addresses of the processes before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, world = next(rendezvous("env://"))
    distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=distributed.PrefixStore(f"attempt {attempt}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
    )
    try:
        with name_dead_ranks(distributed.group.WORLD):
            yield distributed.get_rank() == 0
    finally:
        # A wrapped model that only the collector would find keeps the group's threads alive, and one of them
        # that lets go of a tensor while the interpreter ends makes the process abort.
        gc.collect()
        distributed.destroy_process_group()


class Remaining:
    """How long runs still take, from the steps they took since the first call of `seconds`.

    >>> clock = iter([0.0, 10.0, 20.0])
    >>> remaining = Remaining(lambda: next(clock))
    >>> [remaining.seconds({"label": "a", "run": 1, "runs": 2, "step": k, "steps": 4}) for k in (0, 1, 4)]
    [None, 70.0, 20.0]
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._first: dict[int, float] = {}
        self._now: dict[int, float] = {}

    def seconds(self, state: dict[str, Any]) -> float | None:
        """Seconds until all runs have ended, now that one has come so far; None at first."""
        now, run = self._clock(), state["run"]
        if self._began is None:
            self._began = now
        self._now[run] = state["step"] / state["steps"]
        self._first.setdefault(run, self._now[run])  # what was done before this command
        done = sum(self._now[run] - first for run, first in self._first.items())
        return (now - self._began) * (state["runs"] - sum(self._now.values())) / done if done > 0 else None


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(8.2), duration(200)
    ('8 s', '3 min 20 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress(shown: bool = True) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What to call with the progress of runs: one line for each that rewrites itself, and one for all.

    Where there is no terminal it is a new line now and then.
    """
    terminal = console(sys.stderr)
    if not shown:
        yield lambda state: None
        return
    remaining = Remaining()
    if not terminal.is_terminal:
        yield lambda state: _print_line(state, remaining.seconds(state))
        return
    columns = ("{task.description}", BarColumn(20), MofNCompleteColumn(), "{task.fields[told]}")
    with Bars(*columns, console=terminal) as bars:
        tasks: dict[str, TaskID] = {}
        everything: TaskID | None = None

        def move(state: dict[str, Any]) -> None:
            nonlocal everything
            title, runs = _title(state), state["runs"]
            if title not in tasks:
                if everything is not None:
                    bars.remove_task(everything)  # it comes last
                tasks[title] = bars.add_task(title, total=state["steps"], told="")
                for old in list(tasks.values())[:-BARS]:
                    bars.update(old, visible=False)
                everything = bars.add_task("all runs", total=runs, told="", visible=runs > 1)
            assert everything is not None
            left = _left(remaining.seconds(state))
            bars.update(tasks[title], completed=state["step"], told=_told(state) + left * (runs == 1))
            over = sum(task.finished for task in bars.tasks if task.id != everything)
            bars.update(everything, completed=over, told=left.strip())

        yield move


def _print_line(state: dict[str, Any], seconds: float | None) -> None:
    if state["step"] % max(1, state["steps"] // LINES) == 0 or state["step"] == state["steps"]:
        step = f"step {state['step']}/{state['steps']}"
        say(f"{_title(state)}  {step}  {_told(state)}{_left(seconds)}", sys.stderr)


def _left(seconds: float | None) -> str:
    return f"  about {duration(seconds)} left" if seconds else ""


def _title(state: dict[str, Any]) -> str:
    return f"{state['label']} ({state['run']}/{state['runs']})" if state["runs"] > 1 else str(state["label"])


def _told(state: dict[str, Any]) -> str:
    forms = {"loss": "loss {:.3f}", "validation": "validation {:.3f}"}
    if state["hit_rate"] is not None:
        forms |= {"hit_rate": "hits {:.0%}", "saved_flops": "saved {:.0%}"}
    return "  ".join(form.format(state[key]) for key, form in forms.items() if state[key] is not None)


@contextmanager
def documents() -> Iterator[Callable[[int, int], None]]:
    """The same for documents and their tokens."""
    from cachemuon_lab.data.prepare import progress_bar

    if console(sys.stderr).is_terminal:
        with progress_bar() as show:
            yield show
        return
    last = 0.0

    def line(documents: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last > 30:
            last = time.monotonic()
            say(f"{documents:,} documents, {tokens:,} tokens", sys.stderr)

    yield line


def say_prepared(meta: dict[str, Any], out: Path) -> None:
    """What a preparation made, and how to use it."""
    train, held = (f"{meta[split]['tokens']:,} tokens" for split in ("train", "val"))
    say(f"{meta['documents']:,} documents: {train} for training, {held} held out, in {out}.")
    say(f"To use them: --set data.path={out}")


def new_table(*columns: str, title: str, justify: Any = "right") -> Table:
    """A table with a title and these heads."""
    table = Table(title=Text(title), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify=justify if number else "left", overflow="fold")
    return table


def console(file: Any = None) -> Console:
    """A console for the stream as it is now; of 140 columns where it is no terminal."""
    file = file or sys.stdout
    return Console(file=file, width=None if file.isatty() else 140, highlight=False)


def display(what: Any) -> None:
    """Print a table or text to the standard output."""
    console().print(what)


def say(text: str, file: Any = None) -> None:
    """Print a plain line at once."""
    print(text, file=file or sys.stdout, flush=True)


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """What to call with the name of each piece of a long measurement."""
    terminal = console(sys.stderr)
    if not terminal.is_terminal:
        yield lambda text: say(text, sys.stderr)
        return
    with terminal.status("") as spinner:
        yield spinner.update
