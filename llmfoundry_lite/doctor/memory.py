"""Patterns written into memory and read back: a bit that is stuck, flips or answers to another address.

Each pattern fills the whole buffer before any of it is read: all zeros, all ones, both chequers, a one that walks
through the 64 bits of a word, and last every word's own address, which two words that are one cannot both hold.
"""

import os
from collections.abc import Callable, Iterator

import torch

from llmfoundry_lite.doctor.finding import Finding, Machine, judge, shorten
from llmfoundry_lite.doctor.timing import all_devices
from llmfoundry_lite.hardware import GIB, MIB

Write = Callable[[torch.Tensor, torch.Tensor], object]
"""(where, what): the words of a chunk."""
Pattern = Callable[[torch.Tensor, int], torch.Tensor]
"""(chunk, its first word's index) -> what belongs there."""

CHUNK_WORDS = 64 * MIB // 8
"""Compared at a time, which needs memory of its own."""
ADDRESS_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that every word's product with it (modulo 2^64) is another; its bits are spread over the word."""


def check(machine: Machine, write: Write = torch.Tensor.copy_) -> Iterator[Finding]:
    for device in all_devices():
        size = _size_bytes(machine, device)
        words = torch.empty(size // 8, dtype=torch.int64, device=device)
        problems = find_errors(words, walking_patterns(2 if machine.quick else 64), write)
        host = device.type == "cpu"
        yield Finding(
            check="memory" if host else f"memory {device}",
            status=judge(problems),
            value=size / GIB,
            unit="GiB",
            detail=shorten(problems) or "every pattern came back",
            fix=("look at `dmesg` and the ECC counters (edac-util), and " if host else _DEVICE_FIX)
            + "take it out of runs"
            if problems
            else "",
        )
        del words


_DEVICE_FIX = "look at the ECC counters (`nvidia-smi -q -d ECC`, `rocm-smi --showrasinfo`), and "


def walking_patterns(num_walking: int) -> list[int]:
    """Words of 64 bits: zeros, ones, chequers, and `num_walking` places of a walking one, spread evenly."""
    walking = [_signed(1 << place) for place in range(0, 64, 64 // num_walking)]
    return [0, -1, _signed(0xAAAAAAAAAAAAAAAA), _signed(0x5555555555555555), *walking]


def find_errors(words: torch.Tensor, constants: list[int], write: Write) -> list[str]:
    """What came back wrong, in words; `words` is int64 and is overwritten."""
    problems = []
    for pattern in (*map(_constant, constants), _addresses):
        for start in range(0, len(words), CHUNK_WORDS):
            chunk = words[start : start + CHUNK_WORDS]
            write(chunk, pattern(chunk, start))
        problems += _compare(words, pattern)
        if len(problems) > 3:
            break
    return problems


def _constant(value: int) -> Pattern:
    return lambda chunk, start: torch.tensor(value, device=chunk.device).expand(len(chunk))


def _compare(words: torch.Tensor, pattern: Pattern) -> list[str]:
    problems = []
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        right = pattern(chunk, start)
        if torch.equal(chunk, right):
            continue
        wrong = (chunk != right).nonzero().flatten()
        first = int(wrong[0])
        bits = (int(chunk[first]) ^ int(right[first])) & (1 << 64) - 1
        problems.append(f"{len(wrong)} words are wrong; at byte {8 * (start + first):#x} bits {bits:#018x} are flipped")
    return problems


def _addresses(chunk: torch.Tensor, start: int) -> torch.Tensor:
    return torch.arange(start, start + len(chunk), dtype=torch.int64, device=chunk.device).mul_(ADDRESS_STRIDE)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _size_bytes(machine: Machine, device: torch.device) -> int:
    """A share of what is free, and never all: others run here, and comparing needs room too."""
    if device.type == "cuda":
        free, most = torch.cuda.mem_get_info(device)[0], GIB if machine.quick else 16 * GIB
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = 64 * MIB if machine.quick else GIB // 8
    return max(MIB, min(free // 2, most)) // 8 * 8
