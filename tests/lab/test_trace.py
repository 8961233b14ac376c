"""benchmarks/trace.py: a step runs through so little code that a stranger can read it."""

import trace

import pytest
import torch

from cachemuon import GramNS


@pytest.fixture(scope="module")
def optimizer():
    return trace.prepared()


@pytest.fixture(scope="module")
def found(optimizer):
    return trace.trace(optimizer.step)


def test_the_step_that_is_traced_reuses_and_refreshes(optimizer, found):
    """Else it would not be the step whose code is counted."""
    outcomes = [event.outcome for event in optimizer.events().values()]
    assert len(outcomes) == 48 and set(outcomes) == {"hit", "expired"}
    assert found.deepest[0].startswith("optim/base.py: ")
    assert {"engine/step.py", "engine/schedule.py", "cache/reuse.py"} <= found.functions.keys()


@pytest.mark.parametrize("what", trace.TARGETS)
def test_a_step_runs_through_little_code(found, what):
    assert found.counts[what] <= trace.TARGETS[what], "\n".join(map(str, found.functions.items()))


def test_what_is_counted_are_functions_of_the_library():
    """Of torch's nothing, and each function once."""
    solver = GramNS()
    once, twice = (trace.trace(lambda n=n: [solver(torch.eye(4, 8)) for _ in range(n)]) for n in (1, 2))
    assert (
        once.counts == twice.counts
        and "GramNS.solve_with_transform" in once.functions["newton_schulz/solvers.py"]
    )
    assert not any("<" in name for names in once.functions.values() for name in names)
    assert trace.trace(lambda: torch.eye(4) @ torch.eye(4)) == trace.Trace({}, [])
