"""Coefficient schedules of the Newton-Schulz polynomial, as cited data.

One iteration maps every singular value x to `x (a + b x^2 + c x^4)`; a schedule is the list of its
`(a, b, c)`. Several sets circulate under the name "Polar Express", so each keeps its name, source and safety.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Schedule:
    """The triples `(a, b, c)` of K iterations, and their source.

    `safety` is the factor s that `triples` are already divided by; see `Schedule.safe`.

    >>> Schedule([(2.0, -1.5, 0.5)] * 3, name="mine").steps
    3
    """

    triples: tuple[Triple, ...]
    name: str = "custom"
    source: str = "user"
    safety: float = 1.0

    def __post_init__(self) -> None:
        rows = tuple(tuple(float(x) for x in row) for row in self.triples)
        if not rows or any(len(row) != 3 or not all(map(math.isfinite, row)) for row in rows):
            raise ValueError(f"triples must be one or more finite (a, b, c), got {rows!r}")
        if not (math.isfinite(self.safety) and self.safety > 0):
            raise ValueError(f"safety must be a positive number, got {self.safety!r}")
        object.__setattr__(self, "triples", rows)

    @classmethod
    def safe(
        cls, raw: Iterable[Sequence[float]], safety: float, *, name: str = "custom", source: str = "user"
    ) -> Schedule:
        """The schedule of the polynomial `p(x / s)` at every step: `(a/s, b/s^3, c/s^5)`.

        A polynomial that is optimal on [l, 1] diverges just above 1, where rounding may put a singular value;
        dividing by s > 1 moves that edge to s.

        >>> Schedule.safe([(2.0, -1.0, 0.5)], 2.0).triples
        ((1.0, -0.125, 0.015625),)
        """
        s = float(safety)
        checked = cls(raw, safety=s).triples  # type: ignore[arg-type]
        return cls(tuple((a / s, b / s**3, c / s**5) for a, b, c in checked), name, source, s)

    @property
    def steps(self) -> int:
        """K, the number of iterations."""
        return len(self.triples)

    @property
    def cubic(self) -> int:
        """The number of iterations with c = 0, which need no square of the Gram matrix."""
        return sum(c == 0 for _, _, c in self.triples)

    @property
    def gain(self) -> float:
        """The factor for a singular value near zero: the product of all a.

        >>> round(GRAM.gain)
        804
        """
        return math.prod(a for a, _, _ in self.triples)


# Each is optimal on the interval that the steps before it leave; the eighth is the limit.
POLAR_EXPRESS_RAW: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def polar_express(steps: int = 5, safety: float = 1.01, *, name: str = "polar-express") -> Schedule:
    """The first `steps` triples of Polar Express with a safety factor; after the eighth the last repeats.

    >>> polar_express(10).steps
    10
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}")
    raw = (POLAR_EXPRESS_RAW + POLAR_EXPRESS_RAW[-1:] * steps)[:steps]
    source = "Amsel, Persson, Musco, Gower: The Polar Express, 2025, arXiv:2505.16932"
    return Schedule.safe(raw, safety, name=name, source=source)


POLAR_EXPRESS = polar_express(5, 1.01)
"""PolarExpMuon's schedule in the paper: Polar Express, safety factor 1.01."""

GRAM = polar_express(5, 1.05, name="gram")
"""GramMuon's and CacheMuon's schedule in the paper: Polar Express, safety factor 1.05."""

QUINTIC = Schedule(((3.4445, -4.7750, 2.0315),) * 5, name="quintic", source="Jordan et al.: Muon, 2024")
"""Jordan's one triple five times, torch.optim.Muon's default: steep at zero, and ends between 0.7 and 1.2."""

# Each is optimal on the interval that the steps before it leave, from [0.001, 1] on.
CANS_RAW: tuple[Triple, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)

CANS = Schedule.safe(
    CANS_RAW,
    1.01,
    name="cans",
    source="Grishina, Smirnov, Rakhuba: Accelerating Newton-Schulz, 2025, arXiv:2506.10935; triples of "
    "NVIDIA's Emerging-Optimizers",
)
"""CANS in five steps. Its triples leave no room above 1: the safety factor, `POLAR_EXPRESS`'s, is ours."""

CUBIC5 = Schedule(
    # `1.3 (3 y - y^3) / 2` with `y = x sqrt(3 / (l^2 + l u + u^2))`, on [l, u] = [0.007, 1] first, then on
    # [p(l), 1.3]: of all cubics that stay below 1.3 the one with the largest least value.
    (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
    name="cubic5",
    source="Huang: How Much Orthogonalization Does Muon Need?, 2026, arXiv:2606.00371; triples of "
    "NVIDIA's Emerging-Optimizers",
)
"""The relaxed cubic: c = 0, so each step saves a product. It lifts less (gain 119), to 0.77 to 1.3."""

DEEPSEEK_V4 = Schedule(
    QUINTIC.triples[:1] * 8 + ((2.0, -1.5, 0.5),) * 2,
    name="deepseek-v4",
    source="DeepSeek-AI: DeepSeek-V4, 2026, section 2.4",
)
"""DeepSeek-V4's ten steps: eight of Jordan's, which lift, then two that settle at 1."""
