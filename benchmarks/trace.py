"""How much code one step of CacheMuon runs through: library files, functions, and the deepest call stack.

    python benchmarks/trace.py [--functions]

The step has default settings, but for `cache_all=True`, and 48 matrices with GPT-2 Small's shapes at a small
width. Before it come 12 other steps, so it reuses some transforms and refreshes others. Comprehensions are
counted with the function that has them. `--functions` also lists what was called, and the deepest stack.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch.nn import Parameter

import cachemuon
from cachemuon import CacheMuon
from cachemuon_lab.performance import Cells, to_markdown
from cachemuon_lab.totals import gpt2_shapes

LIBRARY = Path(cachemuon.__file__).parent
WIDTH, WARM_UP = 32, 12
TARGETS = {"files": 8, "functions": 50, "depth": 8}
"""At most so much, so that a stranger can read a step."""

HEADS = {"files": "library files", "functions": "library functions", "depth": "deepest library call stack"}


@dataclass(frozen=True)
class Trace:
    """What was called of the library: functions by file, and the deepest stack, the outermost call first."""

    functions: dict[str, list[str]]
    deepest: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """The number of files and functions, and the depth, by the keys of `TARGETS`."""
        numbers = [len(names) for names in self.functions.values()]
        return {"files": len(numbers), "functions": sum(numbers), "depth": len(self.deepest)}


def trace(call: Callable[[], object]) -> Trace:
    """What `call` runs of the library."""
    seen: set[CodeType] = set()
    deepest: list[CodeType] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and _is_function(frame.f_code):
            seen.add(frame.f_code)
            stack = [outer.f_code for outer in _outwards(frame) if _is_function(outer.f_code)]
            if len(stack) > len(deepest):
                deepest[:] = reversed(stack)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    functions: dict[str, list[str]] = {}
    for file, name in sorted((_file_of(code), code.co_qualname) for code in seen):
        functions.setdefault(file, []).append(name)
    return Trace(functions, [f"{_file_of(code)}: {code.co_qualname}" for code in deepest])


def _is_function(code: CodeType) -> bool:
    """Whether it is a function of the library, and no comprehension within one."""
    inner = code.co_name.startswith("<") and code.co_name != "<lambda>"
    return code.co_filename.startswith(f"{LIBRARY}{os.sep}") and not inner


def _file_of(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(LIBRARY).as_posix()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def prepared(width: int = WIDTH) -> CacheMuon:
    """The optimizer after its warm-up, with the gradients of the next step."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in gpt2_shapes(12, width)]
    optimizer = CacheMuon(params, cache_all=True)
    for number in range(WARM_UP + 1):
        for param in params:
            param.grad = torch.randn_like(param)
        if number < WARM_UP:
            optimizer.step()
    return optimizer


def table(found: Trace) -> Cells:
    """A row for each number, with the target."""
    counts = found.counts
    return [
        ["", "a step", "at most"],
        *([HEADS[key], str(counts[key]), str(most)] for key, most in TARGETS.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="also list what was called")
    args = parser.parse_args()
    found = trace(prepared().step)
    print(to_markdown(table(found)))
    if args.functions:
        for file, names in found.functions.items():
            print(f"\n{file} ({len(names)})", *names, sep="\n    ")
        print("\nThe deepest stack", *found.deepest, sep="\n    ")


if __name__ == "__main__":
    main()
