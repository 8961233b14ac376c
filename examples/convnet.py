"""A convolutional net: a kernel (out, in, kh, kw) is the matrix (out, in*kh*kw).

Run `python examples/convnet.py`.
"""

import torch
from torch import nn

from cachemuon import CacheMuon, param_groups

CLASSES, CHANNELS = 10, 224


def images(number: int, size: int = 16):
    """Noise over a pattern for each class, and the classes."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(1 + number)
    labels = torch.randint(CLASSES, (size,), generator=drawn)
    return patterns[labels] + torch.randn(size, 3, 8, 8, generator=drawn), labels


def layer(inputs: int, outputs: int, stride: int):
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


def main(steps: int = 60) -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(
        *layer(3, CHANNELS, stride=2),
        *layer(CHANNELS, CHANNELS, stride=2),
        *layer(CHANNELS, CHANNELS, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, CLASSES),
    ).to(memory_format=torch.channels_last)
    # The first convolution is 224 x 27: a fresh solve of so thin a matrix is cheap, and it is not cached.
    optimizer = CacheMuon(param_groups(model, adam=dict(lr=2e-3)), lr=0.02)
    losses = []
    for number in range(steps):
        inputs, labels = images(number)
        loss = nn.functional.cross_entropy(model(inputs.to(memory_format=torch.channels_last)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(optimizer.explain())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return {"losses": losses, "stats": optimizer.cache_stats()}


if __name__ == "__main__":
    main()
