"""GPT-2 as the paper trains it: the original's function, under readable names.

Per block four matrices, which are Muon's: `attention.qkv` (3d x d, fused), `attention.output` (d x d),
`mlp.up` (4d x d) and `mlp.down` (d x 4d). The output head is the token embedding itself and has no module
of its own, so a checkpoint holds it once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02
"""Standard deviation of every initial weight, before residual projections are scaled down."""


@dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2.

    `dropout` is the one rate of embeddings, attention and residual branches. `bias=False` omits the biases
    of the LayerNorms too.

    >>> GPT2Config(layers=2, heads=4, width=64).context
    1024
    """

    layers: int
    heads: int
    width: int
    context: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocabulary"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width={self.width}, got {self.heads!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout!r}")


GPT2_SMALL = GPT2Config(layers=12, heads=12, width=768, bias=False)
"""The paper's GPT-2 Small: no dropout, no biases, 124,337,664 parameters (124,439,808 with biases)."""

GPT2_LARGE = GPT2Config(layers=36, heads=20, width=1280, dropout=0.1)
"""The paper's GPT-2 Large: 774,030,080 parameters."""


class Attention(nn.Module):
    """Causal self-attention: `softmax(mask(Q K^T / sqrt(d / heads))) V` per head, then `output`."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.output = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to (B, T, d)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, T, d/H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.output(y.transpose(1, 2).flatten(2))  # (B, T, d)
        return mixed


class MLP(nn.Module):
    """`down(gelu(up(x)))`, with the tanh approximation that GPT-2 was trained with."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to (B, T, d)."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """`x += attention(norm(x))`, then `x += mlp(norm(x))`: the norm stands inside the branch."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to (B, T, d)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT2(nn.Module):
    """A language model: tokens (B, T) to logits (B, T, vocabulary), or with targets to the mean loss.

    `targets[:, t]` is the token that follows `tokens[:, t]`: the caller shifts, and may mark a target as
    not counted by torch's -100.

    >>> model = GPT2(GPT2Config(layers=1, heads=2, width=8, context=16, vocabulary=11))
    >>> tokens = torch.tensor([[1, 2, 3, 4]])
    >>> model(tokens).shape, model(tokens, targets=tokens).shape
    (torch.Size([1, 4, 11]), torch.Size([]))
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights anew; also for a model built on the meta device, after `to_empty`.

        All are `N(0, 0.02^2)`, but the two that write into the residual stream, `attention.output` and
        `mlp.down`, have 0.02 / sqrt(2 layers), so that all 2 layers branches together add the variance of
        one. Biases are 0, the scales of norms 1.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("attention.output", "mlp.down"))
                std = INIT_STD / math.sqrt(2 * self.config.layers) if residual else INIT_STD
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocabulary), or their mean cross-entropy to the targets (B, T), in nats."""
        if tokens.ndim != 2 or tokens.shape[1] > self.config.context:
            allowed = f"(batch, time) with time at most the context, {self.config.context}"
            raise ValueError(f"tokens must have the shape {allowed}, got {tuple(tokens.shape)}")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(
                f"targets must have the shape of tokens, {tuple(tokens.shape)}, got {tuple(targets.shape)}"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))  # (B, T, d)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.token_embedding.weight)
        if targets is None:
            return logits
        # In bfloat16 a loss near 3 would move in steps of 0.016.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, a scalar to differentiate."""
        loss: Tensor = self(inputs, targets)
        return loss

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """`{"loss"}` on the device, without gradients; dropout acts unless the model is in eval mode."""
        with torch.no_grad():
            return {"loss": self.loss(inputs, targets)}
