import pytest

from llmfoundry_islands.tests.ranks import make_ranks


@pytest.fixture
def ranks():
    ranks = make_ranks()
    yield ranks
    for rank in ranks:
        rank.exchange.close()
