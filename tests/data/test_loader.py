"""The digest of a batch."""

import torch

from llmfoundry_lite.data.loader import batch_digest


def test_a_row_counts_with_its_padding_and_a_row_of_padding_does_not():
    full, part, padding = [1, 2, 3], [1, 2, -100], [-100] * 3
    both = batch_digest(torch.tensor([full, part]))
    assert both == batch_digest(torch.tensor([part, padding, full]))
    assert both != batch_digest(torch.tensor([full])) and batch_digest(torch.tensor([padding])) == 0
