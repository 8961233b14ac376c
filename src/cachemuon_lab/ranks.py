"""This process among its like: what they tell one another, how they share a model, and its whole state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer

from cachemuon.distributed import full_tensor, sharded_as
from cachemuon.optim.settings import ADAM_RULES, check, check_entries, check_form
from cachemuon_lab.models import BLOCKS, Model

STRATEGIES = ("ddp", "fsdp")
"""How several processes share a model: each has a copy (`DistributedDataParallel`), or shards (FSDP2)."""


@dataclass(frozen=True)
class Ranks:
    """This process among its like. With one process nothing is communicated."""

    rank: int
    world: int
    strategy: str = "ddp"

    @classmethod
    def current(cls, strategy: str = "ddp") -> Ranks:
        """As torch.distributed has it; one alone if that is not initialized."""
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
        if not dist.is_initialized():
            return cls(0, 1, strategy)
        return cls(dist.get_rank(), dist.get_world_size(), strategy)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether no process has a whole model."""
        return self.world > 1 and self.strategy == "fsdp"

    @property
    def copies(self) -> Any:
        """The process group of which each has a copy of the model; None where there is no such."""
        return dist.group.WORLD if self.world > 1 and not self.sharded else None

    def share(self, micro_batches: int) -> int:
        """How many of a step's micro-batches are this process's."""
        if micro_batches % self.world:
            raise ValueError(
                f"accumulation * replicas must be divisible by the number of processes, {self.world}, "
                f"got {micro_batches}"
            )
        return micro_batches // self.world

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            dist.barrier()

    def sum(self, *values: float) -> tuple[Any, ...]:
        """Of each value, the sum over all processes."""
        return tuple(map(sum, zip(*self.gather(values), strict=True)))

    def gather(self, value: Any) -> list[Any]:
        """All processes' values, in the order of their ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def shard(self, model: Model) -> None:
        """With FSDP, give each process its shards: of each block, and of what is left."""
        if not self.sharded:
            return
        from torch.distributed.fsdp import fully_shard

        for module in [module for module in model.modules() if isinstance(module, BLOCKS)]:
            fully_shard(module)
        fully_shard(model)

    def joined(self, model: Model) -> nn.Module:
        """What to call in training, so that gradients are averaged over all processes."""
        return model if self.copies is None else DistributedDataParallel(model)

    def apart(self, forward: nn.Module, more_to_come: bool) -> AbstractContextManager[Any]:
        """Within it gradients are only averaged if this is the step's last micro-batch."""
        if isinstance(forward, DistributedDataParallel):
            return forward.no_sync() if more_to_come else nullcontext()
        if self.sharded:
            forward.set_requires_gradient_sync(not more_to_come)  # type: ignore[operator]
        return nullcontext()

    def synchronize_buffers(self, model: Model) -> None:
        """Give all the first one's statistics of batch norms, as DistributedDataParallel does by itself."""
        for buffer in model.buffers() if self.sharded else ():
            dist.broadcast(buffer, 0)


def whole_model(model: Model) -> dict[str, Tensor]:
    """The weights as one process alone has them. Every rank must call it."""
    return {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Go on from a state as `cachemuon.distributed.whole_state_dict` gives it, on any number of ranks."""
    if isinstance(optimizer, AdamW):  # Muons check what they load, and shard it
        check_form(state)
        for group in state["param_groups"]:
            check(group, ADAM_RULES)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            entries = state["state"].get(number, {})
            check_entries(f"parameter {number}", param, {"use_muon": False}, entries)
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.shape == param.shape:
                    entries[key] = sharded_as(param, value.to(param.device))
    optimizer.load_state_dict(state)
