"""Clocks: contenders that take turns, ratios within rounds, the machine they ran on.

In a round each contender has its turn, in an order that rotates, so that a busy moment of the machine affects
all of them alike. The ratio of two contenders is the median of their ratios within rounds; its spread are the
quartiles.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer
from torch.profiler import ProfilerActivity, profile

from cachemuon.optim.base import MatrixOptimizer
from cachemuon_lab.config import RunConfig
from cachemuon_lab.models import build
from cachemuon_lab.optimizers import Meter, make_optimizer
from cachemuon_lab.train import open_data

Name = TypeVar("Name")


def avoid_trapped_bf16() -> None:
    """Where multiplying in bf16 kills the process, let oneDNN do without the instructions that did it.

    Some virtual machines announce AMX and trap it. To be called before the first product.
    """
    program = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if subprocess.run([sys.executable, "-c", program], capture_output=True).returncode < 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"


def keep_memory() -> bool:
    """Let this process keep the memory it frees for the next allocation, where the C library is glibc.

    As torch's own allocator does on a GPU. By default glibc gives large blocks back at once, and the system
    clears each page of the next one anew: a sixth of a forward and backward pass of GPT-2 Small
    (docs/notebook/gpt2-small.md). Says whether the C library took it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    no_own_mappings, never_trimmed = (-4, 0), (-1, 2**31 - 1)  # M_MMAP_MAX, M_TRIM_THRESHOLD
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in (no_own_mappings, never_trimmed))


def machine(device: str) -> dict[str, str]:
    """What the figures were measured on."""
    about = {"torch": torch.__version__, "python": platform.python_version(), "system": platform.system()}
    if device == "cuda":
        return about | {"device": torch.cuda.get_device_name()}
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    about |= {"device": names[0] if names else platform.processor() or "CPU"}
    about |= {"threads": str(torch.get_num_threads())}
    return about | ({"bf16": f"limited to {limit}, more is trapped"} if limit else {})


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def race(
    contenders: Mapping[str, Callable[[], object]], rounds: int, device: str, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds of every contender in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-warm, rounds):
        for name in turns(contenders, number):
            took = seconds_of(contenders[name], device)
            if number >= 0:
                seconds[name].append(took)
    return seconds


def turns(names: Iterable[Name], number: int) -> list[Name]:
    """The names in the order of that round: each round another one begins.

    >>> turns("abc", 1)
    ['b', 'c', 'a']
    """
    order = list(names)
    shift = number % len(order)
    return order[shift:] + order[:shift]


def train_in_turns(configs: Sequence[RunConfig], steps: int) -> list[list[dict[str, float]]]:
    """Seconds of each training step of each run, on the CPU: `step_seconds`, and of these those of the
    optimizer and of its matrix part. The runs take turns step by step; the first, cold one is left out.
    From here on the process keeps its memory (`keep_memory`).
    """
    keep_memory()
    runs = []
    for config in configs:
        torch.manual_seed(config.seed)
        model = build(config.model)
        meter = Meter(make_optimizer(config.optimizer, model), torch.device("cpu"))
        runs.append((open_data(config), model, meter))
    took: list[list[dict[str, float]]] = [[] for _ in configs]
    for step in range(steps + 1):
        for number in turns(range(len(configs)), step):
            data, model, meter = runs[number]
            began = meter.now()
            model(*data.train(step)).backward()
            meter.step()
            meter.optimizer.zero_grad()
            if step:
                took[number].append({"step_seconds": meter.now() - began, **meter.seconds})
    return took


def seconds_of(call: Callable[[], object], device: str) -> float:
    """How long a call takes, on a GPU until its work is done; without garbage collection, as in timeit, which
    would hit whoever has its turn.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began
    finally:
        if collecting:
            gc.enable()


def spread(values: Sequence[float]) -> list[float]:
    """Median and quartiles.

    >>> spread([5.0, 1.0, 2.0, 4.0, 3.0])
    [3.0, 2.0, 4.0]
    """
    if len(values) < 2:
        return [values[0]] * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]


def ratios(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, list[float]]:
    """Every contender's time as a ratio to the base's of the same round: median and quartiles.

    A contender may have left early.

    >>> ratios({"a": [1.0, 2.0], "b": [2.0, 4.0]}, "a")["b"]
    [2.0, 2.0, 2.0]
    """
    return {
        name: spread([one / other for one, other in zip(times, seconds[base], strict=False)])
        for name, times in seconds.items()
    }


class Drive:
    """An optimizer on parameters of its own, stepped through a sequence of gradients again and again."""

    def __init__(
        self,
        make: Callable[[list[Parameter]], Optimizer],
        gradients: Sequence[Sequence[Tensor]],
    ) -> None:
        self.gradients, self.number = gradients, 0
        self.params = [Parameter(0.02 * torch.randn_like(sequence[0])) for sequence in gradients]
        self.optimizer = make(self.params)
        self.meter = Meter(self.optimizer, self.params[0].device, synchronize=False)

    def load(self) -> None:
        """Set the next gradients; not part of what is timed."""
        for param, sequence in zip(self.params, self.gradients, strict=True):
            param.grad = sequence[self.number % len(sequence)].clone()
        self.number += 1

    def step(self) -> None:
        """One step of the optimizer."""
        self.meter.step()

    def peak_bytes(self) -> int:
        """The most memory that a step has beyond what was there before, its working memory included."""
        self.load()
        if isinstance(self.optimizer, MatrixOptimizer):
            self.optimizer.cache_stats()  # takes in what the last step has measured
            self.optimizer.loaded()  # and this step allocates its working memory again
        device = self.params[0].device
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.optimizer.step()
            return int(torch.cuda.max_memory_allocated() - before)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self.optimizer.step()
        held, peak = 0, 0
        assert seen.profiler is not None and seen.profiler.kineto_results is not None
        for event in seen.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return int(peak)
