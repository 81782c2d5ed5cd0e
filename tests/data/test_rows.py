"""A sample's columns become a row of token ids, or an error that says what is wrong with them."""

import numpy as np
import pytest

from llmfoundry_lite.data.rows import RowReader
from llmfoundry_lite.errors import DataError


@pytest.mark.parametrize("wrong", [-1, -100, 50, 1 << 40])
@pytest.mark.parametrize("place", [0, 3])
def test_a_token_outside_the_vocabulary_is_named_below_it_and_above(wrong, place):
    """A negative id would train as padding, without a loss."""
    tokens = np.array([3, 0, 49, 7], np.int64)
    reader = RowReader(4, 50, None, "int64")
    assert reader.read({"tokens": tokens}).tolist() == tokens.tolist()
    tokens[place] = wrong
    with pytest.raises(DataError, match=f"^token id {wrong} is outside the vocabulary of 50"):
        reader.read({"tokens": tokens})
