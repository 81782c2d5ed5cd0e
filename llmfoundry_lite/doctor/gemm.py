"""Matrix products in every precision against float64 on the CPU, and against themselves.

Two kinds of input. *Signs*: entries ±1, 256 products to a sum, so that every partial sum is an integer up to 256 in
any order, which fp32, bf16 and fp16 all hold exactly: the one right answer, bit for bit. In fp32 one side is scaled by
1 + 2^-12, which TF32 has no digits for. Longer sums, at the shapes of real models, stay exact because all but 256
entries of a column are 0, one in each of 256 equal stretches.

*Reals*: magnitudes in [1/2, 1), compared within the bound of a sum of k products (Higham, Accuracy and Stability of
Numerical Algorithms, §3.1), |C - C64| <= g sum |a||b| + u |C64| with
g = k v / (1 - k v): products of bf16 and fp16 are exact in fp32, where they are summed; v is 2^-23, since matrix units
may cut off instead of rounding; u, of the last rounding, is the output's.
"""

import math
import time
from collections.abc import Callable, Iterator

import torch

from llmfoundry_lite.devices import device_type
from llmfoundry_lite.doctor.finding import Finding, Machine, judge, shorten
from llmfoundry_lite.doctor.timing import all_devices

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LENGTH = 256
"""Of the sums; what bf16 counts to."""
ROWS = 64
"""Tokens that go through the layers below."""
LAYERS = {"MPT-125M": ((768, 2304), (3072, 768)), "MPT-1B": ((2048, 8192), (8192, 2048))}
LARGE_LAYERS = {"MPT-7B": ((4096, 16384), (16384, 4096))}
"""(length of the sums, outputs): into the attention or the wide side of the feed-forward, and out of it."""
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST_NORMAL = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-14}
"""Below it, fp16 has fewer digits, or none: some devices flush such numbers to zero."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
QUICK_REPEATS, REPEATS = 100, 300
"""Of one product; a fault in one of 20 escapes 100 of them with a probability of 0.6 %."""
LAYER_REPEATS, LAYER_SECONDS = 20, 0.3
"""Of each layer, and when to stop where a device is slow at it: a fault of large products alone may come and go too."""
BROKEN = "take this device out of runs: it does not compute what others do"
TF32 = "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE"


def check(machine: Machine, multiply: Multiply = torch.matmul) -> Iterator[Finding]:
    _forbid_shortcuts()
    is_cpu = device_type() == "cpu"
    size = (256 if machine.quick else 512) * (1 if is_cpu else 8)
    repeats = QUICK_REPEATS if machine.quick else REPEATS
    layers = layers_for(is_cpu=is_cpu, quick=machine.quick)
    for dtype in UNIT_ROUNDOFF:
        signs, reals = Product.of_signs(size, LENGTH, size, dtype), Product.of_reals(size, dtype)
        again = reals.first_rows(256) if is_cpu else reals
        problems, share = [], 0.0
        for device in all_devices():
            found = first_wrong(signs, multiply, device) or _changes(again, multiply, device, repeats)
            for name, length, columns in () if found else layers:
                layer = Product.of_signs(ROWS, length, columns, dtype)
                if found := first_wrong(layer, multiply, device) or _changes(
                    layer, multiply, device, LAYER_REPEATS, LAYER_SECONDS
                ):
                    found = f"{ROWS} x {length} x {columns} of {name}: {found}"
                    break
            worst = reals.error_over_bound(multiply(reals.a_mk.to(device), reals.b_kn.to(device)))
            share = max(share, worst)
            if not found and not worst <= 1:  # also where it is not a number
                found = f"an error of {worst:.3g} times what rounding allows"
            if found:
                problems.append(f"{device}: {found}")
        models = ", ".join(dict.fromkeys(name for name, *_ in layers))
        yield Finding(
            check=f"gemm {NAMES[dtype]}",
            status=judge(problems),
            value=share,
            unit="of bound",
            detail=shorten(problems)
            or f"{size} x {LENGTH} x {size} and layers of {models}: exact on ±1; bit-equal {repeats} times",
            fix=(TF32 if "TF32" in shorten(problems) else BROKEN) if problems else "",
        )


def layers_for(*, is_cpu: bool, quick: bool) -> list[tuple[str, int, int]]:
    """(model, length of the sums, outputs) of the products to try."""
    names = ["MPT-125M"] if is_cpu and quick else list(LAYERS)
    known = {name: LAYERS[name] for name in names} | ({} if is_cpu or quick else LARGE_LAYERS)
    return [(name, *shape) for name, shapes in known.items() for shape in shapes]


def _forbid_shortcuts() -> None:
    """TF32, and sums that are carried on in bf16 or fp16."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class Product:
    """A product whose answer is known, and how far from it a result may be."""

    def __init__(self, a_mk: torch.Tensor, b_kn: torch.Tensor):
        self.a_mk, self.b_kn = a_mk, b_kn
        dtype, length = a_mk.dtype, a_mk.shape[1]
        a64, b64 = a_mk.double(), b_kn.double()
        self.answer_mn = a64 @ b64
        gamma = length * 2.0**-23 / (1 - length * 2.0**-23)
        last = UNIT_ROUNDOFF[dtype] * (1 + gamma)
        self.bound_mn = gamma * (a64.abs() @ b64.abs()) + last * self.answer_mn.abs() + SMALLEST_NORMAL[dtype]

    @classmethod
    def of_signs(cls, rows: int, length: int, columns: int, dtype: torch.dtype) -> "Product":
        """`length` is a multiple of LENGTH."""
        a_mk, signs = _random_signs(rows, length, seed=1), _random_signs(LENGTH, columns, seed=2)
        stretch = length // LENGTH
        within = torch.randint(0, stretch, signs.shape, generator=torch.Generator().manual_seed(6))
        places = torch.arange(0, length, stretch)[:, None] + within
        b_kn = torch.zeros(length, columns).scatter_(0, places, signs)
        scale = 1 + 2.0**-12 if dtype == torch.float32 else 1.0
        return cls((a_mk * scale).to(dtype), b_kn.to(dtype))

    @classmethod
    def of_reals(cls, size: int, dtype: torch.dtype) -> "Product":
        generator = torch.Generator().manual_seed(3)
        a_mk = _random_signs(size, LENGTH, seed=4) * (0.5 + torch.rand(size, LENGTH, generator=generator) / 2)
        b_kn = _random_signs(LENGTH, size, seed=5) * (0.5 + torch.rand(LENGTH, size, generator=generator) / 2)
        return cls(a_mk.to(dtype), b_kn.to(dtype))

    def first_rows(self, rows: int) -> "Product":
        return Product(self.a_mk[:rows], self.b_kn[:, :rows].contiguous())

    def error_over_bound(self, result_mn: torch.Tensor) -> float:
        """The largest; above 1 the result is wrong, and NaN where the result is NaN."""
        return ((result_mn.cpu().double() - self.answer_mn).abs() / self.bound_mn).max().item()


def _random_signs(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (rows, columns), generator=generator).float() * 2 - 1


def first_wrong(signs: Product, multiply: Multiply, device: torch.device) -> str:
    """Where a product of signs is not exact; empty if it is."""
    result_mn = multiply(signs.a_mk.to(device), signs.b_kn.to(device)).cpu().double()
    wrong = (result_mn != signs.answer_mn).nonzero()
    if not len(wrong):
        return ""
    if signs.a_mk.dtype == torch.float32 and torch.equal(result_mn, signs.answer_mn.round()):
        return "fp32 products are computed in TF32 although that was forbidden"
    row, column = wrong[0].tolist()
    got, right = result_mn[row, column].item(), signs.answer_mn[row, column].item()
    return f"{len(wrong)} of {result_mn.numel()} sums are wrong, the first at [{row}, {column}]: {got!r}, not {right!r}"


def _changes(
    product: Product, multiply: Multiply, device: torch.device, repeats: int, limit_seconds: float = math.inf
) -> str:
    """Whether the same product comes out different; empty if it does not."""
    began = time.perf_counter()
    a_mk, b_kn = product.a_mk.to(device), product.b_kn.to(device)
    first_mn = _bits(multiply(a_mk, b_kn))
    most, num_other, num_again = 0, 0, 0
    while num_again < repeats - 1 and time.perf_counter() - began < limit_seconds:
        num_again += 1
        other_mn = _bits(multiply(a_mk, b_kn))
        if not torch.equal(other_mn, first_mn):
            most, num_other = max(most, int((other_mn != first_mn).sum())), num_other + 1
    if not num_other:
        return ""
    return (
        f"{most} of {first_mn.numel()} sums changed when the same product was computed again "
        f"({num_other} of {num_again} times)"
    )


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)
