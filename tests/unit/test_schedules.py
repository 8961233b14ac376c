import math
import pathlib
import re

import pytest
import torch
from reference import paper
from restarts import CANS, CANS_RAW, CUBIC5, DEEPSEEK_V4

from cachemuon import GRAM, POLAR_EXPRESS, QUINTIC, GramNS, Schedule, StandardNS, polar_express

NAMED = (POLAR_EXPRESS, GRAM, QUINTIC, CANS, CUBIC5, DEEPSEEK_V4)


@pytest.mark.parametrize(
    "schedule, table, safety",
    [(POLAR_EXPRESS, paper.POLAR_EXPRESS, 1.01), (GRAM, paper.GRAM, 1.05)],
    ids=["polar-express", "gram"],
)
def test_the_papers_tables_to_all_their_digits(schedule, table, safety):
    assert [tuple(round(x, 9) for x in triple) for triple in schedule.triples] == table
    assert schedule.safety == safety
    assert "2505.16932" in schedule.source


def test_jordans_triple():
    assert QUINTIC.triples == ((3.4445, -4.7750, 2.0315),) * 5


def test_every_step_is_divided_by_the_safety_factor():
    raw, safe = polar_express(8, 1.0), polar_express(8, 1.25)
    for (a, b, c), (x, y, z) in zip(raw.triples, safe.triples, strict=True):
        assert (x, y, z) == pytest.approx((a / 1.25, b / 1.25**3, c / 1.25**5), rel=1e-15)


def test_more_than_eight_steps_repeat_the_limit():
    assert polar_express(10, 1.0).triples[7:] == ((1.875, -1.25, 0.375),) * 3


def test_a_schedule_takes_any_sequence_and_is_hashable():
    mine = Schedule([[2, -1.5, 0.5]], name="mine", source="me")
    assert mine.triples == ((2.0, -1.5, 0.5),)
    assert hash(mine) == hash(Schedule(((2.0, -1.5, 0.5),), name="mine", source="me"))


@pytest.mark.parametrize("triples", [[], [(1, 2)], [(1, 2, math.nan)], [(1, 2, 3), (1, math.inf, 0)]])
def test_triples_that_are_none_are_refused(triples):
    with pytest.raises(ValueError, match=r"triples must be one or more finite \(a, b, c\), got"):
        Schedule(triples)


@pytest.mark.parametrize("safety", [0, -1, math.nan])
def test_a_safety_factor_must_be_positive(safety):
    with pytest.raises(ValueError, match="safety must be a positive number, got"):
        Schedule.safe([(1, 2, 3)], safety)


def test_a_schedule_has_at_least_one_step():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        polar_express(0)


def mapped(triples, x):
    for a, b, c in triples:
        x = x * (a + b * x**2 + c * x**4)
    return x


def test_cubic5_is_its_closed_form():
    # Of all cubics that stay below u on [l, h] the one with the largest least value touches u once and has
    # equal ends; then l and h are what it leaves. Published to seven decimals.
    u, low, high = 1.3, 0.007, 1.0
    for a, b, c in CUBIC5.triples:
        alpha = math.sqrt(3 / (low**2 + low * high + high**2))
        assert (a, b, c) == pytest.approx((1.5 * u * alpha, -0.5 * u * alpha**3, 0), abs=5.1e-8)
        low, high = mapped([(a, b, c)], low), u
    assert low == pytest.approx(0.7741, abs=1e-4)


def test_every_step_of_cans_is_optimal_on_what_the_one_before_it_leaves():
    # Chebyshev: the error is the same at both ends and at both extrema inside, with signs in turn. From
    # [0.001, 1] on. Published to four decimals, which x + x^3 + x^5 at x = 2 makes 2e-3 of.
    low, high = 1e-3, 1.0
    for triple in CANS_RAW:
        a, b, c = triple
        root = math.sqrt(9 * b**2 - 20 * a * c)
        inside = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
        assert low < inside[0] < inside[1] < high
        values = [mapped([triple], x) for x in (low, *inside, high)]
        errors = [sign * (1 - value) for sign, value in zip((1, -1, 1, -1), values, strict=True)]
        assert max(errors) - min(errors) < 2.1e-3, errors
        high, low = values[1:3]
    assert (low, high) == pytest.approx((0.886, 1.114), abs=2e-3)
    assert CANS.triples == Schedule.safe(CANS_RAW, 1.01).triples


def test_deepseek_v4_is_eight_of_jordans_and_two_that_settle():
    assert DEEPSEEK_V4.triples == QUINTIC.triples[:1] * 8 + ((2.0, -1.5, 0.5),) * 2
    a, b, c = DEEPSEEK_V4.triples[-1]
    assert a + b + c == 1 and a + 3 * b + 5 * c == 0  # 1 stays, and attracts quadratically


def interval(schedule):
    """From which singular value on all end in a band, and that band; 1 plus rounding included."""
    x = torch.logspace(-6, 0, 200_001, dtype=torch.float64)
    x = torch.cat([x, torch.tensor([1 + 1e-6])])
    y = mapped(schedule.triples, x)
    least = y[x > 0.02].min()
    low = x[y < least - 1e-3].max()
    return float(low), float(least), float(y.max())


def test_the_table_of_schedules():
    page = (pathlib.Path(__file__).parents[2] / "docs/notebook/restarts.md").read_text()
    table = page.split("## The schedules")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| `(\w+)` \| .* \| (\d+) \| (\d+) \| ([\d.e-]+) \| ([\d.]+) to ([\d.]+) \|$", table, re.M
    )
    names = {name: schedule for name, schedule in globals().items() if schedule in NAMED}
    assert [names[row[0]] for row in rows] == list(NAMED)
    for name, steps, gain, *numbers in rows:
        schedule = names[name]
        low, least, most = interval(schedule)
        assert (int(steps), int(gain)) == (schedule.steps, round(schedule.gain)), name
        assert numbers == [f"{low:.1g}", f"{least:.3f}", f"{most:.3f}"], name


@pytest.mark.parametrize("schedule", NAMED, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("shape", [(48, 48), (32, 128), (128, 32)], ids=str)
def test_every_schedule_in_both_forms(schedule, shape):
    # Singular values from 1 to 1e-4: float64 is what the polynomial says; float32 is as in
    # docs/notebook/restarts.md.
    g = torch.Generator().manual_seed(0)
    n = min(shape)
    U = torch.linalg.qr(torch.randn(shape[0], n, generator=g, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(shape[1], n, generator=g, dtype=torch.float64)).Q
    S = torch.logspace(0, -4, n, dtype=torch.float64)
    M, expected = (U * S) @ V.mT, (U * mapped(schedule.triples, S / S.norm())) @ V.mT
    for solver in (StandardNS(schedule, eps=0), GramNS(schedule, eps=0)):
        torch.testing.assert_close(solver(M), expected, rtol=0, atol=1e-9)
        error = torch.dist(solver(M.float()), expected) / expected.norm()
        assert error < 2e-4, (solver, error)
