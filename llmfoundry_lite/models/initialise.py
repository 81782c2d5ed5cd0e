"""Fresh weights as a function of (seed, parameter name, index): the same on every world size and device.

numpy's Philox generator, keyed by (seed, n) and started at counter i, draws block i of parameter n, BLOCK numbers. A
rank draws only the blocks that overlap its shard, on the CPU, so that no device's generator decides a single bit.
Blocks are independent: as many threads draw them as the rank has cores. Meanwhile numpy holds no interpreter's lock.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmfoundry_lite.config.layout import RowRanges, runs_between
from llmfoundry_lite.config.model_schema import InitConfig, ModelConfig
from llmfoundry_lite.models.mpt import MPT, Norm
from llmfoundry_lite.ranks.rank import count_usable_cores, this_rank

BLOCK = 1 << 16

Draw = Callable[[np.random.Generator, np.ndarray], None]
"""Fills the second argument, contiguous fp32, with the first one's numbers."""


@torch.no_grad()
def initialise_weights(model: MPT, seed: int) -> None:
    """Fill every parameter of a materialised model, sharded or not, by the scheme of its `init_config`."""
    num_threads = max(1, count_usable_cores() // this_rank().local_world_size)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = _plain_name(f"{module_name}.{name}")
            if isinstance(module, Norm):
                _local(parameter).fill_(1.0 if name == "weight" else 0.0)
            elif name == "bias" and model.config.init_config.name != "default_":
                _local(parameter).zero_()
            else:
                draw = _scheme(module, full_name, parameter.shape, model.config)
                _fill(parameter, draw, seed, full_name, getattr(module, "row_order", None), num_threads)


def draw_range(draw: Draw, seed: int, name: str, start: int, out: np.ndarray, num_threads: int = 1) -> None:
    """Fill `out` with the numbers from `start` on of the unbounded sequence of (seed, name)."""
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), dtype="<u8")
    first, last = start // BLOCK, -(-(start + out.size) // BLOCK)

    def draw_every(thread: int) -> None:
        for index in range(first + thread, last, num_threads):
            # Philox's 256-bit counter moves in its lowest word while drawing; the highest one tells blocks apart.
            generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, index]))
            begin = index * BLOCK - start
            part = out[max(begin, 0) : begin + BLOCK]
            if part.size == BLOCK:
                draw(generator, part)
            else:  # draw a whole block: numbers may depend on how many are drawn
                whole = np.empty(BLOCK, np.float32)
                draw(generator, whole)
                skipped = max(-begin, 0)
                part[:] = whole[skipped : skipped + part.size]

    num_threads = min(num_threads, last - first)
    if num_threads <= 1:
        draw_every(0)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(draw_every, range(num_threads)))


def _fill(parameter: Tensor, draw: Draw, seed: int, name: str, row_order: RowRanges | None, num_threads: int) -> None:
    lengths, offset = _own_box(parameter)
    if 0 in lengths:
        return
    row_size = math.prod(parameter.shape[1:])
    runs = [(0, parameter.size(0))] if row_order is None else row_order
    for first, count, at in runs_between(runs, offset[0], offset[0] + lengths[0]):
        target = _local(parameter).narrow(0, at, count)
        has_whole_rows = target.shape[1:] == parameter.shape[1:]
        is_in_place = has_whole_rows and target.is_cpu and target.dtype == torch.float32 and target.is_contiguous()
        rows = target if is_in_place else torch.empty(count, *parameter.shape[1:])
        draw_range(draw, seed, name, first * row_size, rows.detach().view(-1).numpy(), num_threads)
        if not is_in_place:
            for dim in range(1, rows.ndim):  # tensor parallelism divides some matrices by columns
                rows = rows.narrow(dim, offset[dim], lengths[dim])
            target.copy_(rows)


def _own_box(parameter: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Return this rank's size and offset along each dimension."""
    if not isinstance(parameter, DTensor):
        return parameter.shape, [0] * parameter.ndim
    return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)


def _plain_name(name: str) -> str:
    """Undo what activation checkpointing and torch.compile add to the names of a block that they wrap."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# --------------------------------------------------------------------------------------------- the schemes


def _scheme(module: nn.Module, name: str, shape: torch.Size, config: ModelConfig) -> Draw:
    init = config.init_config
    if init.name == "default_":
        return _torch_default(module)
    if isinstance(module, nn.Embedding):
        if init.emb_init_std is not None:
            return _normal(init.emb_init_std)
        if init.emb_init_uniform_lim is not None:
            limit = init.emb_init_uniform_lim
            return _uniform(*limit) if isinstance(limit, list) else _uniform(-limit, limit)
    # LLM Foundry draws the projections to q, k and v head by head; each head's own fans count.
    is_per_head = name.endswith((".Wqkv.weight", ".Wq.weight", ".Wk.weight", ".Wv.weight"))
    fan_out, fan_in = config.head_dim if is_per_head else shape[0], shape[1]
    divisor = _residual_divisor(config) if name.endswith(("out_proj.weight", "down_proj.weight")) else 1.0
    return _weight_scheme(init, fan_in, fan_out, config.d_model, divisor)


def _weight_scheme(init: InitConfig, fan_in: int, fan_out: int, d_model: int, divisor: float) -> Draw:
    """Choose the named scheme, scaled by 1/divisor.

    kaiming: He et al. 2015; xavier: Glorot and Bengio 2010; small: Nguyen and Salazar 2019, sqrt(2 / (5 d)).
    """
    if init.name.startswith("kaiming"):
        gain = nn.init.calculate_gain(init.init_nonlinearity, init.init_gain)  # type: ignore[arg-type]
        std = gain / math.sqrt(fan_in if init.fan_mode == "fan_in" else fan_out)
    elif init.name.startswith("xavier"):
        std = (init.init_gain or 1.0) * math.sqrt(2.0 / (fan_in + fan_out))
    elif init.name == "baseline_":
        assert init.init_std is not None
        std = init.init_std
    else:
        std = math.sqrt(2.0 / (5.0 * d_model))
    std /= divisor
    return _uniform(-math.sqrt(3.0) * std, math.sqrt(3.0) * std) if init.name.endswith("uniform_") else _normal(std)


def _residual_divisor(config: ModelConfig) -> float:
    value = config.init_config.init_div_is_residual
    if config.init_config.name == "neox_init_":
        # GPT-NeoX: 2 / (L sqrt(d)) for these weights, against small_init's sqrt(2 / (5 d)).
        return config.n_layers / math.sqrt(10.0)
    if value is False:
        return 1.0
    return math.sqrt(2.0 * config.n_layers) if value is True else float(value)


def _torch_default(module: nn.Module) -> Draw:
    """Draw as torch's own layers do: N(0, 1) for embeddings, U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for linear layers."""
    if isinstance(module, nn.Linear):
        limit = 1.0 / math.sqrt(module.in_features)
        return _uniform(-limit, limit)
    return _normal(1.0)


def _normal(std: float) -> Draw:
    def draw(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.standard_normal(dtype=np.float32, out=out)
        out *= np.float32(std)

    return draw


def _uniform(low: float, high: float) -> Draw:
    def draw(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.random(dtype=np.float32, out=out)
        out *= np.float32(high - low)
        out += np.float32(low)

    return draw
