import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Four processes; a job may ask for fewer."""
    pool = Ranks(4)
    yield pool
    pool.stop()
