"""How much memory a step may take, and how much a matrix needs."""

from __future__ import annotations


def memory_limit(max_workspace_bytes: int | None, device_type: str) -> int:
    """The bytes that a step may use beside the state.

    The default is 64 MiB on a CPU, where batches that exceed its caches take longer than single matrices
    (docs/notebook/performance.md), and 1 GiB on other devices, where each operation has a launch cost.

    >>> memory_limit(None, "cpu"), memory_limit(None, "cuda"), memory_limit(5, "cpu")
    (67108864, 1073741824, 5)
    """
    if max_workspace_bytes is not None:
        return max_workspace_bytes
    return 2**26 if device_type == "cpu" else 2**30


def solve_bytes(n: int, m: int, itemsize: int = 4) -> int:
    """The most bytes that a solve of an n x m matrix needs beside the state: five n x m, seven n x n.

    >>> solve_bytes(768, 3072) / 2**20
    60.75
    """
    return itemsize * n * (5 * m + 7 * n)


def hit_bytes(n: int, m: int, columns: int, itemsize: int = 4) -> int:
    """The most bytes that a hit with that many random vectors needs: five n x m, four n x n, thin
    ones, and the small ones of an inverse root.

    >>> hit_bytes(768, 3072, 56) / 2**20
    56.7685546875
    """
    return itemsize * (n * (5 * m + 4 * n) + columns * (2 * m + 8 * n + 12 * columns))
