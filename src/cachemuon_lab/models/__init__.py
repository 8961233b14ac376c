"""The models of the experiments, behind one small protocol, so that one training loop serves all.

A model maps `(inputs)` to logits and `(inputs, targets)` to the mean loss. `model.loss(inputs, targets)` is
that loss, to be differentiated; `model.metrics(inputs, targets)` gives, without gradients and on the device,
"loss" and for images also "correct", a count. Under DistributedDataParallel call the wrapper itself,
`ddp(inputs, targets)`: only that synchronizes the gradients.
"""

from __future__ import annotations

from .gpt2 import GPT2, GPT2_LARGE, GPT2_SMALL, Block, GPT2Config
from .resnet import RESNET18, BasicBlock, ResNet18, ResNetConfig

ModelConfig = GPT2Config | ResNetConfig
Model = GPT2 | ResNet18
BLOCKS = (Block, BasicBlock)
"""What these models repeat."""


def build(config: ModelConfig) -> Model:
    """The model that a configuration describes, with fresh weights from torch's global generator.

    >>> type(build(ResNetConfig(width=2))).__name__
    'ResNet18'
    """
    if isinstance(config, GPT2Config):
        return GPT2(config)
    if isinstance(config, ResNetConfig):
        return ResNet18(config)
    raise ValueError(f"config must be a GPT2Config or a ResNetConfig, got {config!r}")


__all__ = [
    "BLOCKS",
    "GPT2",
    "GPT2_LARGE",
    "GPT2_SMALL",
    "RESNET18",
    "GPT2Config",
    "Model",
    "ModelConfig",
    "ResNet18",
    "ResNetConfig",
    "build",
]
