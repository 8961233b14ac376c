"""Clocks: what the process does with its memory while they run."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from cachemuon_lab.timing import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(16):
        torch.ones(16 * 2**20)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
assert keep_memory()
faults()  # the first blocks are of the system, and small ones may lie in between
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_that_was_freed_is_taken_again():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    given_back, kept = map(int, found.stdout.split())
    assert kept < given_back / 10
