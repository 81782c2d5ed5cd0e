"""The digest of a state: the same however it is divided, and another when any bit is."""

import itertools
import struct

import pytest
import torch
import xxhash

from llmfoundry_lite.checkpoint.full_tensors import open_checkpoint, read_full
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.state_digest import format_digest, sum_keyed
from llmfoundry_lite.checkpoint.store import CheckpointStore

WORD = 2**64


def key(name, place):
    """By docs/checkpoint-format.md, in Python's whole numbers."""
    z = (place * 0x9E3779B97F4A7C15 + xxhash.xxh3_64_intdigest(name.encode())) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return (z ^ (z >> 31)) | 1


def digest_by_the_page(tensors):
    total = 0
    for name, tensor in tensors.items():
        size = min(tensor.element_size(), 4)
        rows = tensor.reshape(len(tensor) if tensor.ndim else 1, -1)
        row_keys = [key(f"{name}/rows", row) for row in range(len(rows))]
        raw = rows.contiguous().view(torch.uint8).numpy().tobytes()
        bits = [number for (number,) in struct.iter_unpack({1: "<B", 2: "<H", 4: "<I"}[size], raw)]
        width = len(bits) // len(rows)
        column_keys = [key(f"{name}/columns", column) for column in range(width)]
        total += sum(number * row_keys[i // width] * column_keys[i % width] for i, number in enumerate(bits))
    return format_digest(total)


def digest(tensor, name="model/w"):
    return sum_keyed(name, tensor, (0,) * tensor.ndim, tensor.shape)


def divided(tensor, *cuts):
    """Sum over boxes: the tensor cut along each dimension into so many parts."""
    bounds = [[n * i // count for i in range(count + 1)] for n, count in zip(tensor.shape, cuts, strict=True)]
    total = 0
    for box in itertools.product(*(itertools.pairwise(places) for places in bounds)):
        part = tensor[tuple(slice(begin, end) for begin, end in box)]
        total += sum_keyed("model/w", part, [begin for begin, _ in box], tensor.shape)
    return total % WORD


@pytest.mark.parametrize("shape", [(7, 6), (7, 5), (9,), (1, 2), (5, 4, 6), (0, 3), (300, 1030)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_division_has_one_digest(shape, dtype):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    whole = digest(tensor) % WORD
    for cuts in itertools.product((1, 2, 3), repeat=len(shape)):
        assert divided(tensor, *cuts) == whole
    if 0 < tensor.numel() < 1000:
        assert format_digest(whole) == digest_by_the_page({"model/w": tensor})


def test_numbers_that_lie_askew_in_memory_have_the_same_digest():
    numbers = torch.randn(1 + 6 * 8)
    assert digest(numbers[1:].view(6, 8)) == digest(numbers[1:].clone().view(6, 8))


@pytest.mark.parametrize("shape", [(6, 8), (48,), (6, 7)])
def test_two_flipped_signs_anywhere_change_it_and_so_does_every_bit(shape):
    numbers = torch.randn(shape)
    before = digest(numbers)
    flipped = numbers.clone().reshape(-1)
    for first, second in itertools.combinations_with_replacement(range(numbers.numel()), 2):
        flipped[[first, second]] *= -1
        assert digest(flipped.view(shape)) != before
        flipped[[first, second]] *= -1
    seen = set()
    for place, bit in itertools.product(range(numbers.numel()), range(32)):
        bits = numbers.clone().view(torch.int32)
        bits.view(-1)[place] ^= -(2**31) if bit == 31 else 1 << bit
        seen.add(digest(bits.view(torch.float32)))
    assert len(seen) == 32 * numbers.numel() and before not in seen


def test_the_name_and_the_place_count():
    numbers = torch.randn(6, 8)
    others = [numbers.flip(0), numbers.flip(1), numbers[[1, 0, 2, 3, 4, 5]], numbers.t().reshape(6, 8)]
    assert len({digest(numbers), digest(numbers, "model/v"), *map(digest, others)}) == 6


def test_a_save_has_the_digest_of_its_files_and_of_the_state_that_it_was_of(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(13, 6), torch.nn.Linear(6, 5), torch.nn.LayerNorm(5))
    model[1].register_buffer("scale", torch.tensor(3.0))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    saver = Saver(CheckpointStore(tmp_path))
    saver.take_lease()
    expected = saver.digest(model, optimizer)
    saver.save(model, optimizer, SaveMetadata(timestamp=Timestamp(batch=3)))
    with torch.no_grad():
        model[1].weight[0, 0] += 1
    saved = saver.wait()
    checkpoint = open_checkpoint(tmp_path / "ba3")
    assert saved.state_digest == checkpoint.manifest.state_digest == expected
    assert digest_by_the_page(read_full(checkpoint, list(checkpoint.manifest.tensors))) == expected
    assert saver.digest(model, optimizer) != expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_device_computes_the_same(dtype):
    tensor = (torch.randn(300, 1030) * 1000).to(dtype)
    assert digest(tensor.cuda()) % WORD == digest(tensor) % WORD
