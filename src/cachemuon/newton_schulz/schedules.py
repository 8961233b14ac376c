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
