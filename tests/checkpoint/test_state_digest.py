"""The digest of a state: the same however it is divided, and another when any bit is."""

import itertools
import struct

import numpy as np
import pytest
import torch
import xxhash

from llmfoundry_lite.checkpoint.full_tensors import open_checkpoint, read_full
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.state_digest import format_digest, sum_keyed
from llmfoundry_lite.checkpoint.store import CheckpointStore

SMALL_SHAPES = [(7, 6), (7, 5), (9,), (1, 2), (5, 4, 6)]
LARGE_SHAPE = (300, 1030)
EMPTY_SHAPE = (0, 3)
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


# ----------------------------------------------------------------- the digest by docs/checkpoint-format.md, in Python


def documented_key(name, index):
    z = (index * 0x9E3779B97F4A7C15 + xxhash.xxh3_64_intdigest(name.encode())) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) | 1


def bits_of_elements(tensor):
    """Each element's bits as a whole number, or as two for an element of 8 bytes."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    number_format = {1: "<B", 2: "<H", 4: "<I", 8: "<I"}[tensor.element_size()]
    return [number for (number,) in struct.iter_unpack(number_format, raw)]


def documented_digest(tensors):
    total = 0
    for name, tensor in tensors.items():
        bits = bits_of_elements(tensor)
        num_rows = len(tensor) if tensor.ndim else 1
        num_columns = len(bits) // num_rows
        row_keys = [documented_key(f"{name}/rows", row) for row in range(num_rows)]
        column_keys = [documented_key(f"{name}/columns", column) for column in range(num_columns)]
        for index, number in enumerate(bits):
            row, column = divmod(index, num_columns)
            total += number * row_keys[row] * column_keys[column]
    return f"{total % 2**64:016x}"


# ----------------------------------------------------------------------------------------------- of one tensor


def random_tensor(shape, dtype):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)


def digest(tensor, name="model/w"):
    """The digest of a whole tensor."""
    return sum_keyed(name, tensor, (0,) * tensor.ndim, tensor.shape)


def cut_into(size, num_parts):
    """The slices that cut a dimension into so many parts. Parts may be empty."""
    bounds = [size * part // num_parts for part in range(num_parts + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def digest_of_boxes(tensor, parts_per_dim):
    """The sum over the boxes of a tensor that is cut, along each dimension, into so many parts."""
    slices_per_dim = [cut_into(size, num_parts) for size, num_parts in zip(tensor.shape, parts_per_dim, strict=True)]
    total = 0
    for box in itertools.product(*slices_per_dim):
        offset = [part.start for part in box]
        total += sum_keyed("model/w", tensor[box], offset, tensor.shape)
    return total % 2**64


@pytest.mark.parametrize("shape", [*SMALL_SHAPES, EMPTY_SHAPE, LARGE_SHAPE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_division_has_one_digest(shape, dtype):
    tensor = random_tensor(shape, dtype)
    expected = digest(tensor)
    for parts_per_dim in itertools.product((1, 2, 3), repeat=len(shape)):
        assert digest_of_boxes(tensor, parts_per_dim) == expected, parts_per_dim


@pytest.mark.parametrize("shape", SMALL_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_the_documented_one(shape, dtype):
    tensor = random_tensor(shape, dtype)
    assert format_digest(digest(tensor)) == documented_digest({"model/w": tensor})


def test_numbers_that_lie_askew_in_memory_have_the_same_digest():
    """Elements are read two at a time, and these begin at an address that is no multiple of 8."""
    askew = torch.randn(1 + 6 * 8)[1:].view(6, 8)
    assert digest(askew) == digest(askew.clone())


def digests_with_two_flipped_signs(numbers):
    """For each two elements, and for each alone."""
    for first, second in itertools.combinations_with_replacement(range(numbers.numel()), 2):
        flipped = numbers.clone()
        flipped.view(-1)[[first, second]] *= -1
        yield digest(flipped)


def digests_with_one_flipped_bit(numbers):
    """For each bit of each element."""
    for index in range(numbers.numel()):
        for bit in range(32):
            bits = numbers.numpy().copy().view(np.uint32)
            bits.reshape(-1)[index] ^= np.uint32(1 << bit)
            yield digest(torch.from_numpy(bits.view(np.float32)))


@pytest.mark.parametrize("shape", [(6, 8), (48,), (6, 7)])
def test_two_flipped_signs_anywhere_change_it_and_so_does_every_bit(shape):
    """If elements were multiplied modulo 2^32, two signs would cancel: each would add 2^31, whatever its key."""
    numbers = torch.randn(shape)
    unchanged = digest(numbers)
    assert unchanged not in digests_with_two_flipped_signs(numbers)

    digests = set(digests_with_one_flipped_bit(numbers))
    assert unchanged not in digests
    assert len(digests) == 32 * numbers.numel()


def test_the_name_and_the_place_count():
    numbers = torch.randn(6, 8)
    digests = {
        "as it is": digest(numbers),
        "another name": digest(numbers, "model/v"),
        "rows reversed": digest(numbers.flip(0)),
        "columns reversed": digest(numbers.flip(1)),
        "two rows exchanged": digest(numbers[[1, 0, 2, 3, 4, 5]]),
        "transposed": digest(numbers.t().reshape(6, 8)),
    }
    assert len(set(digests.values())) == len(digests)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_computes_the_same(dtype):
    tensor = random_tensor(LARGE_SHAPE, dtype)
    assert digest(tensor.cuda()) == digest(tensor)


# ------------------------------------------------------------------------------------------------- of a save


def model_and_optimizer_after_one_step():
    """Layers of several kinds, a buffer without dimensions, and the optimizer's state."""
    model = torch.nn.Sequential(torch.nn.Embedding(13, 6), torch.nn.Linear(6, 5), torch.nn.LayerNorm(5))
    model[1].register_buffer("scale", torch.tensor(3.0))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_save_has_the_digest_of_its_files_and_of_the_state_that_it_was_of(tmp_path):
    """The model changes while the save is under way."""
    model, optimizer = model_and_optimizer_after_one_step()
    saver = Saver(CheckpointStore(tmp_path))
    saver.take_lease()
    digest_before = saver.digest(model, optimizer)
    saver.save(model, optimizer, SaveMetadata(timestamp=Timestamp(batch=3)))
    with torch.no_grad():
        model[1].weight[0, 0] += 1
    saved = saver.wait()

    checkpoint = open_checkpoint(tmp_path / "ba3")
    saved_tensors = read_full(checkpoint, list(checkpoint.manifest.tensors))
    assert saved.state_digest == digest_before
    assert checkpoint.manifest.state_digest == digest_before
    assert documented_digest(saved_tensors) == digest_before
    assert saver.digest(model, optimizer) != digest_before
