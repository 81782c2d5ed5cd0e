"""Checks of each device's computing and memory: exact matrix products, patterns in memory, and rates.

`check_gemm` compares matrix products with float64 on the CPU and with themselves; `check_memory` writes patterns and
reads them back; `check_bandwidth` compares rates with the datasheet. Two kinds of products are compared:

*Signs* have entries of +1 and -1, with 256 terms in each sum. Every partial sum is an integer up to 256, which fp32,
bf16 and fp16 hold exactly in any order, so only one result is right, bit for bit. The sums are longer than 256, but all
other terms are 0. In fp32 one side is scaled by 1 + 2^-12, which has more digits than TF32 keeps.

*Reals* have magnitudes in [1/2, 1). They are compared within the bound for a sum of k products (Higham, Accuracy and
Stability of Numerical Algorithms, §3.1): |C - C64| <= g sum |a||b| + u |C64| with g = k v / (1 - k v). Products of bf16
and fp16 are exact in fp32, in which they are summed. v is 2^-23, since matrix units may cut off instead of rounding,
and u is the unit roundoff of the output, which is rounded once.

Suffixes of tensors are their dimensions: m rows and n columns of the result, k terms of each sum.
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
"""Number of terms in a sum that are not 0. bf16 holds all integers up to 256."""
LONG_SUM = 3072
"""Length of the sums of signs, as in a feed-forward layer of MPT-125M. Some faults need long sums."""
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST_NORMAL = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-14}
"""Below it, fp16 has fewer digits or none: some devices flush such numbers to zero."""
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
REPEATS = 300
"""Number of times that a product of reals is computed."""
QUICK_REPEATS = 100
"""A fault in one of 20 products escapes 100 of them with a probability of 0.6 %."""
LONG_REPEATS = 20
"""Number of times that a product of signs, with its long sums, is computed."""
LONG_SECONDS = 0.3
"""Time after which a slow device computes no more long sums."""
WORD_BYTES = 8
CHUNK_WORDS = 64 * MIB // WORD_BYTES
"""Words of memory compared at a time."""
MAX_MEMORY_PROBLEMS = 3
"""Number of problems after which a device's memory is not tested further."""
ADDRESS_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that its products (modulo 2^64) with two words' indices differ; its bits are spread over the word."""
LOWEST_SHARE_OF_MEMORY = 0.6
"""Share of the datasheet's bandwidth; plain copies reach 0.75 to 0.9."""
LOWEST_SHARE_OF_PEAK = 0.4
"""Share of the datasheet's FLOP/s; large products reach 0.5 (MI250) to 0.8."""

BROKEN_FIX = "take this device out of runs: it does not compute what others do"
TF32_FIX = "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE"
CPU_MEMORY_FIX = "look at `dmesg` and the ECC counters (edac-util), and take it out of runs"
DEVICE_MEMORY_FIX = (
    "look at the ECC counters (`nvidia-smi -q -d ECC`, `rocm-smi --showrasinfo`), and take it out of runs"
)
THROTTLED_FIX = "look for a device that is hot, shared or limited in power (`nvidia-smi -q -d PERFORMANCE`, `rocm-smi`)"


def all_devices() -> list[torch.device]:
    """Return all GPUs of this machine, or the CPU if there is none."""
    if device_type() == "cpu":
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def measure_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` calls, after one call that is not timed.

    A GPU times the work with its own clock, since calls return before it has done them.
    """
    work()
    seconds = []
    for _ in range(repeats):
        if device.type == "cpu":
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        else:
            with torch.cuda.device(device):
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                start.record()
                work()
                end.record()
                end.synchronize()
                seconds.append(start.elapsed_time(end) / 1e3)
    return min(seconds)


# -------------------------------------------------------------------------------------------------------- products


def check_gemm(options: CheckOptions) -> Iterator[Finding]:
    """Yield a finding for each precision: are all devices' matrix products exact, repeatable, and within the bound?

    The value is the largest error of reals as a share of what rounding allows. Sets torch's switches for precision,
    which is fine in a process that runs nothing else.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    size = 2048 if options.quick else 4096
    if device_type() == "cpu":
        size = 256
    repeats = QUICK_REPEATS if options.quick else REPEATS
    for dtype in UNIT_ROUNDOFF:
        signs = Product.of_signs(size, LONG_SUM, size, dtype)
        reals = Product.of_reals(size, dtype)
        problems = []
        largest_error = 0.0
        for device in all_devices():
            # Only the first problem of a device is reported.
            problem = (
                describe_wrong_sums(signs, device)
                or describe_changed_sums(signs, device, LONG_REPEATS, LONG_SECONDS)
                or describe_changed_sums(reals, device, repeats)
            )
            error = reals.error_over_bound(device)
            largest_error = max(largest_error, error)
            if not problem and not error <= 1:  # also true for NaN
                problem = f"an error of {error:.3g} times what rounding allows"
            if problem:
                problems.append(f"{device}: {problem}")

        has_tf32 = any("TF32" in problem for problem in problems)
        yield make_finding(
            f"gemm {DTYPE_NAMES[dtype]}",
            problems,
            TF32_FIX if has_tf32 else BROKEN_FIX,
            value=largest_error,
            unit="of bound",
            pass_detail=f"{size} x {LONG_SUM} x {size}: exact on ±1; bit-equal {repeats} times",
        )


class Product:
    """A matrix product whose right result is known.

    Attributes: `a_mk` and `b_kn`, the factors, and `expected_mn`, their product in float64. All are on the CPU.
    """

    def __init__(self, a_mk: torch.Tensor, b_kn: torch.Tensor):
        self.a_mk = a_mk
        self.b_kn = b_kn
        self.expected_mn = a_mk.double() @ b_kn.double()

    @classmethod
    def of_signs(cls, num_rows: int, length: int, num_columns: int, dtype: torch.dtype) -> "Product":
        """Build a product of +1 and -1 with sums of `length`, a multiple of NUM_TERMS.

        Each column of the second factor is divided into NUM_TERMS stretches. Each stretch has one sign at a random
        place, and zeros elsewhere, so that the 256 terms of a sum are spread over its whole length.
        """
        a_mk = random_signs(num_rows, length, seed=1)
        signs = random_signs(NUM_TERMS, num_columns, seed=2)
        stretch = length // NUM_TERMS
        stretch_begins = torch.arange(0, length, stretch)[:, None]
        offsets = torch.randint(0, stretch, signs.shape, generator=torch.Generator().manual_seed(6))
        b_kn = torch.zeros(length, num_columns).scatter_(0, stretch_begins + offsets, signs)

        # TF32 would round this factor to 1.
        scale = 1 + 2.0**-12 if dtype == torch.float32 else 1.0
        return cls((a_mk * scale).to(dtype), b_kn.to(dtype))

    @classmethod
    def of_reals(cls, size: int, dtype: torch.dtype) -> "Product":
        """Build a product of random numbers with magnitudes in [1/2, 1), with `size` rows and columns."""
        generator = torch.Generator().manual_seed(3)
        a_magnitudes_mk = 0.5 + torch.rand(size, NUM_TERMS, generator=generator) / 2
        b_magnitudes_kn = 0.5 + torch.rand(NUM_TERMS, size, generator=generator) / 2
        a_mk = random_signs(size, NUM_TERMS, seed=4) * a_magnitudes_mk
        b_kn = random_signs(NUM_TERMS, size, seed=5) * b_magnitudes_kn
        return cls(a_mk.to(dtype), b_kn.to(dtype))

    def error_over_bound(self, device: torch.device) -> float:
        """Compute the product on `device`, and return its largest error as a multiple of the bound in the module's
        docstring.

        Above 1 the result is wrong. The error is NaN if the result has a NaN.
        """
        result_mn = torch.matmul(self.a_mk.to(device), self.b_kn.to(device)).cpu().double()
        dtype = self.a_mk.dtype
        length = self.a_mk.shape[1]

        gamma = length * 2.0**-23 / (1 - length * 2.0**-23)
        magnitude_sums_mn = self.a_mk.double().abs() @ self.b_kn.double().abs()
        last_rounding_mn = UNIT_ROUNDOFF[dtype] * (1 + gamma) * self.expected_mn.abs()
        bound_mn = gamma * magnitude_sums_mn + last_rounding_mn + SMALLEST_NORMAL[dtype]
        error_mn = (result_mn - self.expected_mn).abs()
        return (error_mn / bound_mn).max().item()


def random_signs(num_rows: int, num_columns: int, seed: int) -> torch.Tensor:
    """Return a matrix of +1 and -1 in fp32, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (num_rows, num_columns), generator=generator).float() * 2 - 1


def describe_wrong_sums(signs: Product, device: torch.device) -> str:
    """Compute a product of signs on `device`, and describe the sums that are not exact. Empty if all are."""
    result_mn = torch.matmul(signs.a_mk.to(device), signs.b_kn.to(device)).cpu().double()
    wrong_indices = (result_mn != signs.expected_mn).nonzero()
    if not len(wrong_indices):
        return ""

    # TF32 drops the 2^-12 of the scale, which leaves the nearest integers.
    if signs.a_mk.dtype == torch.float32 and torch.equal(result_mn, signs.expected_mn.round()):
        return "fp32 products are computed in TF32 although that was forbidden"

    row, column = wrong_indices[0].tolist()
    result = result_mn[row, column].item()
    expected = signs.expected_mn[row, column].item()
    count = f"{len(wrong_indices)} of {result_mn.numel()} sums are wrong"
    return f"{count}, the first at [{row}, {column}]: {result!r}, not {expected!r}"


def describe_changed_sums(product: Product, device: torch.device, repeats: int, limit_seconds: float = math.inf) -> str:
    """Compute a product `repeats` times or until the time is up, and describe sums that changed. Empty if none did.

    The bits are compared, as integers of the same size, so that NaN equals itself.
    """
    began = time.perf_counter()
    a_mk = product.a_mk.to(device)
    b_kn = product.b_kn.to(device)
    integer_dtype = torch.int32 if a_mk.element_size() == 4 else torch.int16
    first_mn = torch.matmul(a_mk, b_kn).view(integer_dtype)

    most_changed = 0
    num_different = 0
    num_repeated = 0
    while num_repeated < repeats - 1 and time.perf_counter() - began < limit_seconds:
        num_repeated += 1
        repeated_mn = torch.matmul(a_mk, b_kn).view(integer_dtype)
        if not torch.equal(repeated_mn, first_mn):
            num_different += 1
            num_changed = int((repeated_mn != first_mn).sum())
            most_changed = max(most_changed, num_changed)

    if not num_different:
        return ""
    times = f"({num_different} of {num_repeated} times)"
    return f"{most_changed} of {first_mn.numel()} sums changed when the same product was computed again {times}"


# ---------------------------------------------------------------------------------------------------------- memory


def check_memory(options: CheckOptions) -> Iterator[Finding]:
    """Write patterns into each device's free memory, read them back, and report words that changed.

    A bit may be stuck or flip, and an address may reach another word. Each pattern fills the whole buffer before any of
    it is read: all zeros, all ones, alternating bits, a single one in each of the 64 places, and last each word's own
    address, which two words cannot both hold if they are the same memory. Stops after MAX_MEMORY_PROBLEMS.
    """
    one_bit_patterns = [1 << bit for bit in range(0, 64, 32 if options.quick else 1)]
    patterns = [0, 0xFFFFFFFFFFFFFFFF, 0xAAAAAAAAAAAAAAAA, 0x5555555555555555, *one_bit_patterns, None]
    for device in all_devices():
        num_words = choose_test_bytes(device, options.quick) // WORD_BYTES
        words = torch.empty(num_words, dtype=torch.int64, device=device)
        problems: list[str] = []
        for pattern in patterns:
            problems += find_changed_words(words, pattern)
            if len(problems) > MAX_MEMORY_PROBLEMS:
                break

        is_cpu = device.type == "cpu"
        yield make_finding(
            "memory" if is_cpu else f"memory {device}",
            problems,
            CPU_MEMORY_FIX if is_cpu else DEVICE_MEMORY_FIX,
            value=num_words * WORD_BYTES / GIB,
            unit="GiB",
            pass_detail="every pattern came back",
        )
        del words  # before the next device's buffer is allocated


def choose_test_bytes(device: torch.device, is_quick: bool) -> int:
    """Return how many bytes of a device's memory to test: half of what is free, but at least 1 MiB, and at most a
    limit.

    The other half stays free for other processes, and for comparing the words.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        most_bytes = GIB if is_quick else 16 * GIB
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most_bytes = 64 * MIB if is_quick else GIB // 8
    return max(MIB, min(free_bytes // 2, most_bytes))


def find_changed_words(words: torch.Tensor, pattern: int | None) -> list[str]:
    """Fill `words` (int64) with a pattern of 64 bits, and describe what is different when it is read back.

    The pattern None is each word's address. Returns one problem for each chunk that has wrong words.
    """
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        chunk.copy_(expected_words(pattern, start, chunk))

    problems = []
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        expected = expected_words(pattern, start, chunk)
        if not torch.equal(chunk, expected):
            wrong_indices = (chunk != expected).nonzero().flatten()
            first = int(wrong_indices[0])
            address = WORD_BYTES * (start + first)
            flipped_bits = (int(chunk[first]) ^ int(expected[first])) & (1 << 64) - 1
            place = f"at byte {address:#x} bits {flipped_bits:#018x} are flipped"
            problems.append(f"{len(wrong_indices)} words are wrong; {place}")
    return problems


def expected_words(pattern: int | None, start: int, chunk: torch.Tensor) -> torch.Tensor:
    """Return the words that `chunk`, which begins at word `start` of the buffer, holds after writing a pattern."""
    if pattern is None:
        return torch.arange(start, start + len(chunk), device=chunk.device).mul_(ADDRESS_STRIDE)
    # int64 holds the upper half of the patterns as negative numbers.
    signed_pattern = pattern - (1 << 64) if pattern >= 1 << 63 else pattern
    return torch.tensor(signed_pattern, device=chunk.device).expand(len(chunk))


# ----------------------------------------------------------------------------------------------------------- rates


def check_bandwidth(options: CheckOptions) -> Iterator[Finding]:
    """Measure the rates of copies within each device and to and from pinned host memory, and of matrix products.

    Rates of memory and products are compared with the datasheet, where `hardware.py` has the device. Copies from and to
    the host are only reported, because their speed depends on the board. On a CPU only its memory is measured.
    """
    is_cpu = device_type() == "cpu"
    num_bytes = GIB // 4
    if options.quick:
        num_bytes = (32 if is_cpu else 256) * MIB
    repeats = 3 if options.quick else 10
    devices = all_devices()
    accelerators = [accelerator(device) for device in devices]

    # A copy reads and writes every byte, and the datasheet's bandwidth counts both.
    rates = [2 * num_bytes / measure_copy(num_bytes, repeats, device, device) for device in devices]
    datasheet_rates = [row and row.memory_bandwidth_bytes_per_second for row in accelerators]
    yield compare_with_datasheet("memory copy", rates, datasheet_rates, LOWEST_SHARE_OF_MEMORY)
    if is_cpu:
        return

    rates = [num_bytes / measure_copy(num_bytes, repeats, None, device) for device in devices]
    yield compare_with_datasheet("host to device", rates)
    rates = [num_bytes / measure_copy(num_bytes, repeats, device, None) for device in devices]
    yield compare_with_datasheet("device to host", rates)

    rates = [measure_product_flops(device, 4096 if options.quick else 8192, repeats) for device in devices]
    datasheet_rates = [row and row.peak_flops("bf16") for row in accelerators]
    yield compare_with_datasheet("gemm rate bf16", rates, datasheet_rates, LOWEST_SHARE_OF_PEAK, "TFLOP/s", 1e12)


def compare_with_datasheet(
    check: str,
    rates: Sequence[float],
    datasheet_rates: Sequence[float | None] = (),
    lowest_share: float = 0.0,
    unit: str = "GB/s",
    scale: float = 1e9,
) -> Finding:
    """Report the slowest device's rate, and warn if it is below `lowest_share` of its datasheet's.

    `rates` and `datasheet_rates` have an entry for each device, in bytes or FLOPs per second. A device without a
    datasheet has None, and an empty sequence means that there is nothing to compare with. The finding is in `unit`,
    which is `scale` bytes or FLOPs per second.
    """
    slowest = min(range(len(rates)), key=rates.__getitem__)
    rate = rates[slowest]
    datasheet_rate = datasheet_rates[slowest] if datasheet_rates else None

    detail = f"device {slowest}, the slowest of {len(rates)}" if len(rates) > 1 else "one device"
    problems = []
    if datasheet_rate is not None:
        detail += f"; {rate / datasheet_rate:.0%} of the datasheet's {datasheet_rate / scale:,.0f}"
        if rate < lowest_share * datasheet_rate:
            problems.append(f"{lowest_share:.0%} should be reached")
    return make_finding(check, problems, THROTTLED_FIX, Status.WARN, value=rate / scale, unit=unit, detail=detail)


def measure_copy(num_bytes: int, repeats: int, source: torch.device | None, target: torch.device | None) -> float:
    """Return the seconds that copying `num_bytes` takes. A source or target of None is pinned host memory.

    Pinned memory stays at its physical address, so that the device reads and writes it directly.
    """
    device = source or target
    assert device is not None  # at least one side is a device

    def allocate(place: torch.device | None) -> torch.Tensor:
        return torch.ones(num_bytes, dtype=torch.uint8, device=place, pin_memory=place is None)

    source_bytes = allocate(source)
    target_bytes = allocate(target)
    return measure_seconds(lambda: target_bytes.copy_(source_bytes, non_blocking=True), device, repeats)


def measure_product_flops(device: torch.device, size: int, repeats: int) -> float:
    """Return the FLOP/s of a product of two square matrices in bf16, with `size` rows each."""
    matrix = torch.randn(size, size, device=device).to(torch.bfloat16)
    product = torch.empty_like(matrix)
    seconds = measure_seconds(lambda: torch.mm(matrix, matrix, out=product), device, repeats)
    return 2 * size**3 / seconds
