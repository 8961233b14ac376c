"""Many cases in two processes: `make fuzz`. Interrupted, the same command goes on.

python -m fuzz --cases 10000
python -m fuzz --case 1234       one of them, with all that it is
"""

import argparse
import hashlib
import json
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from pprint import pprint

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # as in conftest.py

import torch
from fuzz.cases import case
from fuzz.check import check

import cachemuon

CHUNK = 25


def failures(numbers: range) -> dict[int, str]:
    """The cases of these that fail, and how."""
    torch.set_num_threads(1)
    found = {}
    for number in numbers:
        try:
            check(case(number))
        except Exception:
            found[number] = traceback.format_exc(limit=-4)
    return found


def version() -> str:
    """Changes with every line of the library and of the cases."""
    files = [*Path(cachemuon.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in sorted(files)), digest_size=8).hexdigest()


def run(cases: int, first: int, processes: int, kept: Path) -> dict[int, str]:
    """Run them, and note in the file `kept` what is done."""
    done: dict[int, dict[str, str]] = {}
    tried = version()
    if kept.is_file():
        lines = [json.loads(line) for line in kept.read_text().splitlines() if line.endswith("}")]
        done = {line["first"]: line["failed"] for line in lines if line["version"] == tried}
    chunks = [range(at, min(at + CHUNK, first + cases)) for at in range(first, first + cases, CHUNK)]
    failed = {int(k): text for chunk in chunks for k, text in done.get(chunk[0], {}).items()}
    left = [chunk for chunk in chunks if chunk[0] not in done]
    kept.parent.mkdir(parents=True, exist_ok=True)
    began, ran = time.monotonic(), 0
    with ProcessPoolExecutor(processes) as pool, kept.open("a" if done else "w") as file:
        waiting = {pool.submit(failures, chunk): chunk for chunk in left}
        for future in as_completed(waiting):
            chunk, found = waiting[future], future.result()
            file.write(json.dumps({"version": tried, "first": chunk[0], "failed": found}) + "\n")
            file.flush()
            failed |= found
            ran += len(chunk)
            minutes = (time.monotonic() - began) / 60
            rest = minutes / ran * sum(map(len, left)) - minutes
            told = (
                f"{cases - sum(map(len, left)) + ran} of {cases} cases, {len(failed)} failed, {rest:.0f} min"
            )
            print(f"\r{told} left ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int, help="run this one, and say what it is")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kept", type=Path, default=Path("runs", "fuzz.jsonl"), help="what is done so far")
    given = parser.parse_args()
    if given.case is not None:
        pprint(case(given.case), width=110)
        check(case(given.case))
        return
    failed = run(given.cases, given.first, given.processes, given.kept)
    for number, text in sorted(failed.items()):
        print(f"case {number}: {text.strip().splitlines()[-1]}")
    print(f"{given.cases} cases, {len(failed)} failed" + "".join(f" {number}" for number in sorted(failed)))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
