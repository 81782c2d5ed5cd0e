"""Speed and soundness of each device: matrix products, patterns in memory, and rates beside the datasheet.

Products are compared with float64 on the CPU, and with themselves. *Signs*: entries ±1, 256 terms to a sum. Every
partial sum is an integer up to 256, which fp32, bf16 and fp16 hold exactly in any order: one right answer, bit for bit.
The other entries of each long column are 0. In fp32 one side is scaled by 1 + 2^-12, which TF32 has no digits for.

*Reals*: magnitudes in [1/2, 1), compared within the bound of a sum of k products (Higham, Accuracy and Stability of
Numerical Algorithms, §3.1), |C - C64| <= g sum |a||b| + u |C64| with
g = k v / (1 - k v): products of bf16 and fp16 are exact in fp32, where they are summed; v is 2^-23, since matrix units
may cut off instead of rounding; u, of the last rounding, is the output's.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from llmfoundry_lite.devices import accelerator, device_type
from llmfoundry_lite.hardware import GIB, MIB
from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status, make_finding

NUM_TERMS = 256
"""Terms of a sum; bf16 counts to 256."""
LONG = 3072
"""Length of the sums of signs: into and out of a feed-forward layer of MPT-125M. Some faults need long sums."""
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST_NORMAL = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-14}
"""Below it fp16 has fewer digits, or none: some devices flush such numbers to zero."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
QUICK_REPEATS, REPEATS = 100, 300
"""Repeats of real products: a fault in one of 20 escapes 100 of them with a probability of 0.6 %."""
LONG_REPEATS, LONG_SECONDS = 20, 0.3
"""Repeats of long sums, and when to stop on a slow device."""
CHUNK_WORDS = 64 * MIB // 8
"""Words of memory compared at a time."""
ADDRESS_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that its products (modulo 2^64) with two words' indices differ; its bits are spread over the word."""
LOWEST_SHARE_OF_MEMORY = 0.6
"""Share of the datasheet's bandwidth; plain copies reach 0.75 to 0.9."""
LOWEST_SHARE_OF_PEAK = 0.4
"""Share of the datasheet's FLOP/s; large products reach 0.5 (MI250) to 0.8."""

BROKEN = "take this device out of runs: it does not compute what others do"
TF32 = "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE"
CPU_MEMORY = "look at `dmesg` and the ECC counters (edac-util), and take it out of runs"
DEVICE_MEMORY = "look at the ECC counters (`nvidia-smi -q -d ECC`, `rocm-smi --showrasinfo`), and take it out of runs"
THROTTLED = "look for a device that is hot, shared or limited in power (`nvidia-smi -q -d PERFORMANCE`, `rocm-smi`)"


def all_devices() -> list[torch.device]:
    if device_type() == "cpu":
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def measure_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the fastest of `repeats` calls by the device's own clock, after one call that is not measured."""
    work()
    seconds = []
    for _ in range(repeats):
        if device.type == "cpu":
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
            continue
        with torch.cuda.device(device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
    return min(seconds)


# -------------------------------------------------------------------------------------------------------- products


def check_gemm(machine: CheckOptions) -> Iterator[Finding]:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    is_cpu = device_type() == "cpu"
    size = 256 if is_cpu else 2048 if machine.quick else 4096
    repeats = QUICK_REPEATS if machine.quick else REPEATS
    for dtype in UNIT_ROUNDOFF:
        signs, reals = Product.of_signs(size, LONG, size, dtype), Product.of_reals(size, dtype)
        problems, share = [], 0.0
        for device in all_devices():
            found = find_wrong(signs, device) or find_change(signs, device, LONG_REPEATS, LONG_SECONDS)
            found = found or find_change(reals, device, repeats)
            worst = reals.error_over_bound(device)
            share = max(share, worst)
            if not found and not worst <= 1:  # also where it is not a number
                found = f"an error of {worst:.3g} times what rounding allows"
            if found:
                problems.append(f"{device}: {found}")
        yield make_finding(
            f"gemm {NAMES[dtype]}",
            problems,
            TF32 if "TF32" in "".join(problems) else BROKEN,
            value=share,
            unit="of bound",
            pass_detail=f"{size} x {LONG} x {size}: exact on ±1; bit-equal {repeats} times",
        )


class Product:
    """A product with its right answer."""

    def __init__(self, a_mk: torch.Tensor, b_kn: torch.Tensor):
        self.a_mk, self.b_kn = a_mk, b_kn
        self.answer_mn = a_mk.double() @ b_kn.double()

    @classmethod
    def of_signs(cls, rows: int, length: int, columns: int, dtype: torch.dtype) -> "Product":
        """Build a product of ±1; `length` is a multiple of NUM_TERMS."""
        a_mk, signs = random_signs(rows, length, seed=1), random_signs(NUM_TERMS, columns, seed=2)
        stretch = length // NUM_TERMS
        within = torch.randint(0, stretch, signs.shape, generator=torch.Generator().manual_seed(6))
        places = torch.arange(0, length, stretch)[:, None] + within
        b_kn = torch.zeros(length, columns).scatter_(0, places, signs)
        scale = 1 + 2.0**-12 if dtype == torch.float32 else 1.0
        return cls((a_mk * scale).to(dtype), b_kn.to(dtype))

    @classmethod
    def of_reals(cls, size: int, dtype: torch.dtype) -> "Product":
        generator = torch.Generator().manual_seed(3)
        a_mk = random_signs(size, NUM_TERMS, seed=4) * (0.5 + torch.rand(size, NUM_TERMS, generator=generator) / 2)
        b_kn = random_signs(NUM_TERMS, size, seed=5) * (0.5 + torch.rand(NUM_TERMS, size, generator=generator) / 2)
        return cls(a_mk.to(dtype), b_kn.to(dtype))

    def error_over_bound(self, device: torch.device) -> float:
        """Return the largest error; above 1 the result is wrong, and NaN where the result is NaN."""
        result_mn = torch.matmul(self.a_mk.to(device), self.b_kn.to(device)).cpu().double()
        dtype, length = self.a_mk.dtype, self.a_mk.shape[1]
        gamma = length * 2.0**-23 / (1 - length * 2.0**-23)
        sums_mn = self.a_mk.double().abs() @ self.b_kn.double().abs()
        last_mn = UNIT_ROUNDOFF[dtype] * (1 + gamma) * self.answer_mn.abs()
        bound_mn = gamma * sums_mn + last_mn + SMALLEST_NORMAL[dtype]
        return ((result_mn - self.answer_mn).abs() / bound_mn).max().item()


def random_signs(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (rows, columns), generator=generator).float() * 2 - 1


def find_wrong(signs: Product, device: torch.device) -> str:
    """Say where a product of signs is not exact; empty if it is."""
    result_mn = torch.matmul(signs.a_mk.to(device), signs.b_kn.to(device)).cpu().double()
    wrong = (result_mn != signs.answer_mn).nonzero()
    if not len(wrong):
        return ""
    if signs.a_mk.dtype == torch.float32 and torch.equal(result_mn, signs.answer_mn.round()):
        return "fp32 products are computed in TF32 although that was forbidden"
    row, column = wrong[0].tolist()
    got, right = result_mn[row, column].item(), signs.answer_mn[row, column].item()
    return f"{len(wrong)} of {result_mn.numel()} sums are wrong, the first at [{row}, {column}]: {got!r}, not {right!r}"


def find_change(product: Product, device: torch.device, repeats: int, limit_seconds: float = math.inf) -> str:
    """Say how repeats of the same product differ; empty if they do not."""
    began = time.perf_counter()
    a_mk, b_kn = product.a_mk.to(device), product.b_kn.to(device)
    bits = torch.int32 if a_mk.element_size() == 4 else torch.int16
    first_mn = torch.matmul(a_mk, b_kn).view(bits)
    most, num_other, num_again = 0, 0, 0
    while num_again < repeats - 1 and time.perf_counter() - began < limit_seconds:
        num_again += 1
        other_mn = torch.matmul(a_mk, b_kn).view(bits)
        if not torch.equal(other_mn, first_mn):
            most, num_other = max(most, int((other_mn != first_mn).sum())), num_other + 1
    if not num_other:
        return ""
    times = f"({num_other} of {num_again} times)"
    return f"{most} of {first_mn.numel()} sums changed when the same product was computed again {times}"


# ---------------------------------------------------------------------------------------------------------- memory


def check_memory(machine: CheckOptions) -> Iterator[Finding]:
    """Write patterns and read them back: a bit may be stuck, flip, or answer to another address.

    Each pattern fills the whole buffer before any of it is read: all zeros, all ones, both chequers, a one that walks
    through the 64 bits of a word, and last each word's own address, which two words that are one cannot both hold.
    """
    walking = [1 << place for place in range(0, 64, 32 if machine.quick else 1)]
    patterns = [0, 0xFFFFFFFFFFFFFFFF, 0xAAAAAAAAAAAAAAAA, 0x5555555555555555, *walking, None]
    for device in all_devices():
        # A share of what is free, and never all: others run here, and comparing needs room too.
        if device.type == "cuda":
            free, most = torch.cuda.mem_get_info(device)[0], GIB if machine.quick else 16 * GIB
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            most = 64 * MIB if machine.quick else GIB // 8
        words = torch.empty(max(MIB, min(free // 2, most)) // 8, dtype=torch.int64, device=device)
        problems: list[str] = []
        for pattern in patterns:
            problems += find_flipped(words, pattern)
            if len(problems) > 3:
                break
        name, fix = ("memory", CPU_MEMORY) if device.type == "cpu" else (f"memory {device}", DEVICE_MEMORY)
        yield make_finding(
            name, problems, fix, value=len(words) * 8 / GIB, unit="GiB", pass_detail="every pattern came back"
        )
        del words


def find_flipped(words: torch.Tensor, pattern: int | None) -> list[str]:
    """Fill `words` (int64) with a pattern, None for each word's address, and describe what comes back wrong."""
    problems = []
    for is_written in (False, True):
        for start in range(0, len(words), CHUNK_WORDS):
            chunk = words[start : start + CHUNK_WORDS]
            if pattern is None:
                right = torch.arange(start, start + len(chunk), device=chunk.device).mul_(ADDRESS_STRIDE)
            else:
                signed = pattern - (1 << 64) if pattern >= 1 << 63 else pattern
                right = torch.tensor(signed, device=chunk.device).expand(len(chunk))
            if not is_written:
                chunk.copy_(right)
            elif not torch.equal(chunk, right):
                wrong = (chunk != right).nonzero().flatten()
                first = int(wrong[0])
                bits = (int(chunk[first]) ^ int(right[first])) & (1 << 64) - 1
                where = f"at byte {8 * (start + first):#x} bits {bits:#018x} are flipped"
                problems.append(f"{len(wrong)} words are wrong; {where}")
    return problems


# ----------------------------------------------------------------------------------------------------------- rates


def check_bandwidth(machine: CheckOptions) -> Iterator[Finding]:
    """Measure copies within a device, to and from pinned host memory, and products.

    Only memory and matrix units have a figure in `hardware.py` to be judged by; the bus depends on the board.
    """
    is_cpu = device_type() == "cpu"
    size = (32 if is_cpu else 256) * MIB if machine.quick else GIB // 4
    repeats = 3 if machine.quick else 10
    devices = all_devices()
    rows = [accelerator(device) for device in devices]
    rates = [2 * size / measure_copy(size, repeats, device, device) for device in devices]
    figures = [row and row.memory_bandwidth_bytes_per_second for row in rows]
    yield judge_rates("memory copy", rates, figures, LOWEST_SHARE_OF_MEMORY)
    if is_cpu:
        return
    rates = [size / measure_copy(size, repeats, None, device) for device in devices]
    yield judge_rates("host to device", rates)
    rates = [size / measure_copy(size, repeats, device, None) for device in devices]
    yield judge_rates("device to host", rates)
    rates = [measure_flops(device, 4096 if machine.quick else 8192, repeats) for device in devices]
    figures = [row and row.peak_flops("bf16") for row in rows]
    yield judge_rates("gemm rate bf16", rates, figures, LOWEST_SHARE_OF_PEAK, "TFLOP/s", 1e12)


def judge_rates(
    name: str,
    rates: Sequence[float],
    figures: Sequence[float | None] = (),
    lowest_share: float = 0.0,
    unit: str = "GB/s",
    scale: float = 1e9,
) -> Finding:
    """Compare the slowest device's rate with its datasheet's figure, where there is one."""
    slowest = min(range(len(rates)), key=rates.__getitem__)
    rate, figure = rates[slowest], figures[slowest] if figures else None
    detail = f"device {slowest}, the slowest of {len(rates)}" if len(rates) > 1 else "one device"
    if figure is not None:
        detail += f"; {rate / figure:.0%} of the datasheet's {figure / scale:,.0f}"
    is_slow = figure is not None and rate < lowest_share * figure
    problems = [f"{lowest_share:.0%} should be reached"] if is_slow else []
    return make_finding(name, problems, THROTTLED, Status.WARN, value=rate / scale, unit=unit, detail=detail)


def measure_copy(size: int, repeats: int, source: torch.device | None, target: torch.device | None) -> float:
    """Return the seconds for `size` bytes; None is pinned host memory."""
    device = source or target
    assert device is not None
    pinned = None in (source, target)
    there = torch.ones(size, dtype=torch.uint8, device=device)
    other = torch.ones(size, dtype=torch.uint8, pin_memory=pinned, device=None if pinned else device)
    a, b = (other, there) if source is None else (there, other)
    return measure_seconds(lambda: b.copy_(a, non_blocking=True), device, repeats)


def measure_flops(device: torch.device, size: int, repeats: int) -> float:
    """Return the FLOP/s of a square product in bf16."""
    matrix = torch.randn(size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(matrix)
    return 2 * size**3 / measure_seconds(lambda: torch.mm(matrix, matrix, out=out), device, repeats)
