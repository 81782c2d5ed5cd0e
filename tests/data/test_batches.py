"""Samples that are cut into rows."""

import random

import pytest
import torch

from llmfoundry_lite.config.batch_schedule import PerBatch, Steps
from llmfoundry_lite.data.batches import cut_rows

SAMPLE_LENGTH = 24


@pytest.mark.parametrize("seed", range(20))
def test_cutting_keeps_every_token_in_its_place(seed):
    """The rows of a sample, one after the other, are the sample."""
    generator = random.Random(seed)
    lengths = {f"{batch}ba": generator.choice([2, 3, 4, 6, 8, 12, 24]) for batch in generator.sample(range(12), 4)}
    seq_lens = PerBatch.build(SAMPLE_LENGTH, Steps.parse(lengths))
    num_before = generator.randrange(6)  # batches that an earlier launch has trained
    whole = [torch.randint(99, (generator.randrange(1, 5), SAMPLE_LENGTH)) for _ in range(8)]

    cut = list(cut_rows(({"input_ids": samples_bt} for samples_bt in whole), seq_lens, num_before))
    assert len(cut) == len(whole)
    for number, (samples_bt, batch) in enumerate(zip(whole, cut, strict=True), num_before):
        rows_bt = batch["input_ids"]
        length = seq_lens.of(number)
        assert rows_bt.shape == (len(samples_bt) * SAMPLE_LENGTH // length, length)
        for sample, sample_t in enumerate(samples_bt):
            rows = rows_bt[sample * SAMPLE_LENGTH // length : (sample + 1) * SAMPLE_LENGTH // length]
            assert torch.equal(torch.cat(list(rows)), sample_t)


def test_a_batch_is_read_when_it_is_asked_for():
    """The place in the data is that of the batches that have been read."""
    read = []

    def batches():
        for number in range(3):
            read.append(number)
            yield {"input_ids": torch.zeros(1, SAMPLE_LENGTH, dtype=torch.int64)}

    cut = cut_rows(batches(), PerBatch.build(8, None), 0)
    next(cut)
    assert read == [0]
