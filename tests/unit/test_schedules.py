import math

import pytest
from reference import paper

from cachemuon import GRAM, POLAR_EXPRESS, QUINTIC, Schedule, polar_express, quintic


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
    assert quintic(7).steps == 7


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


@pytest.mark.parametrize("make", [polar_express, quintic])
def test_a_schedule_has_at_least_one_step(make):
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        make(0)
