"""A few hundred cases: numbered ones, which `make fuzz CASE=n` replays, and some that hypothesis shrinks."""

import pytest
from fuzz.cases import case
from fuzz.check import check
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_numbered_cases(part):
    for number in range(10_000 + 15 * part, 10_000 + 15 * (part + 1)):
        try:
            check(case(number))
        except Exception as error:
            error.add_note(f"make fuzz CASE={number}")
            raise


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_whatever_hypothesis_chooses(random):
    chosen = case(random)
    note(str(chosen))
    check(chosen)


def test_a_case_is_a_function_of_its_number():
    assert case(5) == case(5) != case(6)
