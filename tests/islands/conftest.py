import pytest

from tests.islands.ranks import make_ranks


@pytest.fixture
def ranks():
    ranks = make_ranks()
    yield ranks
    for rank in ranks:
        rank.exchange.close()
