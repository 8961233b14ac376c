"""A language in which each token decides the next one, and a small GPT that learns it in twenty steps.

A batch is a function of its number alone, so a resumed run sees the same batches.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 64, 16, 256


def batch(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow them."""
    token = torch.randint(VOCABULARY, (size,), generator=torch.Generator().manual_seed(number))
    text = [token]
    for _ in range(LENGTH):
        text.append((5 * text[-1] + 7) % VOCABULARY)
    tokens = torch.stack(text, dim=1)  # size x (LENGTH + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of the next token; without learning it is log(64), about 4.2."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """`param_groups` gives Muon the matrices of the blocks, and Adam embedding, norms, biases and head."""

    def __init__(self, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))
