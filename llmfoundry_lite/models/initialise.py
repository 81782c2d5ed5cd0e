"""Initial weights as a function of seed, parameter name and index: the same on every world size and device.

Each parameter has an endless sequence of numbers, in blocks of BLOCK_SIZE. Block i is drawn by numpy's Philox
generator, whose key is a hash of (seed, name) and whose counter starts at i. A rank draws only the blocks that overlap
its shard, and draws them on the CPU, so that no device's generator decides a single bit. Blocks are independent, so
that as many threads draw them as the rank has cores; numpy does not hold the interpreter's lock meanwhile.

Read from the top: all parameters, one shard, a range of a sequence; then the distributions that `init_config` names.
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

from llmfoundry_lite.config.layout import RowRanges, ranges_between
from llmfoundry_lite.config.model_schema import InitConfig, ModelConfig
from llmfoundry_lite.config.mup import Kind, initial_std_factor
from llmfoundry_lite.models.mpt import MPT, Norm
from llmfoundry_lite.models.mup import kind_of
from llmfoundry_lite.models.own_parts import BY_SCHEME, InitialValues, find_owner, initial_values
from llmfoundry_lite.ranks.rank import count_usable_cores, this_rank

BLOCK_SIZE = 1 << 16
"""Numbers in a block. Another size would change the initial weights of every run."""

Distribution = Callable[[np.random.Generator, np.ndarray], None]
"""Draws numbers from a generator into an array (fp32, contiguous)."""


@torch.no_grad()
def initialise_weights(model: MPT, seed: int) -> None:
    """Fill every parameter of a model in place, by the scheme that its `init_config` names.

    The parameters must have memory, and may be sharded (DTensors). Ranks do not communicate: each fills its own part.
    """
    num_threads = max(1, count_usable_cores() // this_rank().local_world_size)  # the ranks of a node share its cores
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}"
            owner = find_owner(model, full_name)  # a part of the user's own, if it has the parameter
            kind, *numbers = _initial_values(module, name, owner)
            is_zero_bias = kind == "scheme" and name == "bias" and model.config.init_config.name != "default_"
            if kind == "constant" or is_zero_bias:
                _local_tensor(parameter).fill_(0.0 if is_zero_bias else numbers[0])
                continue

            mup_kind = kind_of(full_name, parameter.ndim, owner) if model.config.mup is not None else "hidden"
            full_name = _remove_wrappers(full_name)
            if kind == "scheme":
                distribution = _choose_distribution(module, full_name, parameter.shape, model.config, mup_kind)
            else:
                distribution = {"normal": _normal, "uniform": _uniform}[kind](*numbers)
            _fill_shard(parameter, module, distribution, seed, full_name, num_threads)


def _initial_values(module: nn.Module, name: str, owner: tuple[nn.Module, str] | None) -> InitialValues:
    """Return how a parameter is first drawn. `module` is the layer that has it under `name`.

    A part of the user's own, `owner`, says so itself, or it could not have been built, and so does our norm. Other
    layers of ours follow the scheme.
    """
    if owner is not None:
        values = initial_values(*owner)
        assert values is not None, "refused when the part was built"
        return values
    if isinstance(module, Norm):
        return module.initial_distribution(name)
    return BY_SCHEME


def _fill_shard(
    parameter: Tensor, module: nn.Module, distribution: Distribution, seed: int, name: str, num_threads: int
) -> None:
    """Fill this rank's part of a parameter in place, with the values that one device would draw for that part.

    Each value depends on the seed, the parameter's name and the value's index in the whole parameter, so a rank can
    draw its rows alone.

    `module.row_order`, which tensor parallelism sets on a fused matrix of queries, keys and values, lists ranges of
    rows in the order in which ranks hold them. Without it, ranks hold the rows in their own order.
    """
    lengths, offsets = _local_shape_and_offset(parameter)
    if 0 in lengths:  # this rank has no part of the parameter
        return

    # For each range of rows that this rank holds: its first row in the parameter, and its first row on this rank.
    row_size = math.prod(parameter.shape[1:])
    row_order: RowRanges = getattr(module, "row_order", [(0, parameter.size(0))])
    for first_row, num_rows, local_row in ranges_between(row_order, offsets[0], offsets[0] + lengths[0]):
        target = _local_tensor(parameter).narrow(0, local_row, num_rows)
        has_whole_rows = target.shape[1:] == parameter.shape[1:]
        numpy_can_fill = target.is_cpu and target.dtype == torch.float32 and target.is_contiguous()
        draws_in_place = has_whole_rows and numpy_can_fill

        # Otherwise whole rows are drawn in fp32 on the CPU, and this rank's columns of them are copied.
        rows = target if draws_in_place else torch.empty(num_rows, *parameter.shape[1:])
        draw_range(distribution, seed, name, first_row * row_size, rows.detach().view(-1).numpy(), num_threads)
        if not draws_in_place:
            for dim in range(1, rows.ndim):  # tensor parallelism divides some matrices by columns
                rows = rows.narrow(dim, offsets[dim], lengths[dim])
            target.copy_(rows)


def draw_range(
    distribution: Distribution, seed: int, name: str, start: int, out: np.ndarray, num_threads: int = 1
) -> None:
    """Fill `out` with values `start`, `start` + 1, ... of the endless sequence that belongs to (seed, name).

    `out` is fp32 and contiguous. The sequence is drawn in blocks of BLOCK_SIZE values, each by a generator of its own,
    so that any range of it can be drawn alone and by several threads. With BLOCK_SIZE 65,536, a range of 10,000 values
    from 60,000 on takes the end of block 0 and the beginning of block 1.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype="<u8")
    first_block = start // BLOCK_SIZE
    end_block = math.ceil((start + out.size) / BLOCK_SIZE)
    num_threads = min(num_threads, end_block - first_block)

    def draw_blocks_of_thread(thread: int) -> None:
        """Draw every `num_threads`-th block, and write what `out` takes of it."""
        for block in range(first_block + thread, end_block, num_threads):
            # Drawing raises the lowest word of Philox's 256-bit counter. Blocks differ in the highest one.
            generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, block]))
            offset = block * BLOCK_SIZE - start  # of the block in `out`; below 0 if it begins before `start`
            part = out[max(offset, 0) : offset + BLOCK_SIZE]
            if part.size == BLOCK_SIZE:
                distribution(generator, part)
                continue
            # Draw a whole block nevertheless, because numbers may depend on how many are drawn at once.
            whole = np.empty(BLOCK_SIZE, np.float32)
            distribution(generator, whole)
            num_skipped = max(-offset, 0)
            part[:] = whole[num_skipped : num_skipped + part.size]

    if num_threads <= 1:
        draw_blocks_of_thread(0)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(draw_blocks_of_thread, range(num_threads)))  # a list raises here what a thread has raised


def _local_shape_and_offset(parameter: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Return the size of this rank's part along each dimension, and where it begins."""
    if not isinstance(parameter, DTensor):
        return parameter.shape, [0] * parameter.ndim
    return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)


def _local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; changing it changes the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _remove_wrappers(name: str) -> str:
    """Remove what activation checkpointing and torch.compile add to the names of a block that they wrap."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


# ----------------------------------------------------------------------------------------------- the distributions


def _choose_distribution(
    module: nn.Module, name: str, shape: torch.Size, config: ModelConfig, mup_kind: Kind
) -> Distribution:
    """Return the distribution from which a weight of a linear layer or an embedding is drawn, as LLM Foundry does.

    `name` is the parameter's full name and `shape` that of the whole parameter, over all ranks. `init_config` names the
    scheme. An embedding may have a distribution of its own (`emb_init_std`, `emb_init_uniform_lim`); otherwise the
    scheme decides its standard deviation too.

    With muP, the scheme is applied to the base model. The standard deviations of a wider one follow from those by
    `mup_kind`, the parameter's kind (`config/mup.py`).
    """
    init = config.init_config
    std_factor = initial_std_factor(mup_kind, config.width_mult)
    base_fan_in, base_fan_out = _base_fans(module, shape, config.width_mult, mup_kind)
    if init.name == "default_":
        return _torch_default(module, base_fan_in, std_factor)

    if isinstance(module, nn.Embedding):
        if init.emb_init_std is not None:
            return _normal(init.emb_init_std)
        if isinstance(init.emb_init_uniform_lim, list):
            low, high = init.emb_init_uniform_lim
            return _uniform(low, high)
        if init.emb_init_uniform_lim is not None:
            return _uniform(-init.emb_init_uniform_lim, init.emb_init_uniform_lim)

    # LLM Foundry draws the projections to queries, keys and values head by head, so that a head's own fans count.
    if name.endswith((".Wqkv.weight", ".Wq.weight", ".Wk.weight", ".Wv.weight")):
        base_fan_out = config.base_head_dim
    std = _scheme_std(init, base_fan_in, base_fan_out, config.d_model / config.width_mult)
    # These write into the residual stream. Parts written for LLM Foundry mark their layers with an attribute.
    if name.endswith(("out_proj.weight", "down_proj.weight")) or getattr(module, "_is_residual", False):
        std /= _residual_divisor(config)
    std *= std_factor

    if init.name.endswith("uniform_"):
        limit = math.sqrt(3.0) * std  # U(-limit, limit) has this standard deviation
        return _uniform(-limit, limit)
    return _normal(std)


def _base_fans(module: nn.Module, shape: torch.Size, width_mult: float, mup_kind: Kind) -> tuple[float, float]:
    """Return the numbers of inputs and outputs that a weight of this `shape` has in the base model of muP.

    Only those that grow with the width differ. Rows of an embedding are tokens or positions, and do not. A bias has the
    inputs of its layer, which are taken to grow.
    """
    is_embedding = isinstance(module, nn.Embedding)
    inputs_grow = is_embedding or mup_kind != "input"
    outputs_grow = not is_embedding and mup_kind in ("hidden", "input")
    num_inputs = shape[-1]
    if isinstance(module, nn.Linear) and len(shape) == 1:
        num_inputs = module.in_features
    fan_in = num_inputs / width_mult if inputs_grow else num_inputs
    fan_out = shape[0] / width_mult if outputs_grow else shape[0]
    return fan_in, fan_out


def _scheme_std(init: InitConfig, fan_in: float, fan_out: float, d_model: float) -> float:
    """Return the standard deviation of a weight with `fan_in` inputs and `fan_out` outputs, by the scheme's formula.

    kaiming: He et al. 2015, "Delving Deep into Rectifiers". xavier: Glorot and Bengio 2010, "Understanding the
    Difficulty of Training Deep Feedforward Neural Networks". small_init and neox_init: sqrt(2 / (5 d)), Nguyen and
    Salazar 2019, "Transformers without Tears". baseline: `init_std`.
    """
    if init.name.startswith("kaiming"):
        gain = nn.init.calculate_gain(init.init_nonlinearity, init.init_gain)  # type: ignore[arg-type]
        return gain / math.sqrt(fan_in if init.fan_mode == "fan_in" else fan_out)
    if init.name.startswith("xavier"):
        return (init.init_gain or 1.0) * math.sqrt(2.0 / (fan_in + fan_out))
    if init.name == "baseline_":
        assert init.init_std is not None, "refused when the configuration is checked"
        return init.init_std
    return math.sqrt(2.0 / (5.0 * d_model))  # small_init_ and neox_init_


def _residual_divisor(config: ModelConfig) -> float:
    """Return the number by which weights that write into the residual stream are divided (`init_div_is_residual`)."""
    if config.init_config.name == "neox_init_":
        # GPT-NeoX draws these weights with 2 / (L sqrt(d)), and all others like small_init, with sqrt(2 / (5 d)).
        return config.n_layers / math.sqrt(10.0)
    divisor = config.init_config.init_div_is_residual
    if divisor is False:
        return 1.0
    if divisor is True:
        return math.sqrt(2.0 * config.n_layers)
    return float(divisor)


def _torch_default(module: nn.Module, base_fan_in: float, std_factor: float) -> Distribution:
    """Return what torch's own layers draw from: N(0, 1) for embeddings, U(-1/sqrt(fan_in), 1/sqrt(fan_in)) else.

    `base_fan_in` is that of the base model of muP. `std_factor` is the layer's standard deviation over that of the base
    model.
    """
    if isinstance(module, nn.Linear):
        limit = std_factor / math.sqrt(base_fan_in)
        return _uniform(-limit, limit)
    return _normal(1.0)


def _normal(std: float) -> Distribution:
    """Return the distribution N(0, std^2)."""

    def draw(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.standard_normal(dtype=np.float32, out=out)
        out *= np.float32(std)

    return draw


def _uniform(low: float, high: float) -> Distribution:
    """Return the uniform distribution between `low` and `high`."""

    def draw(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.random(dtype=np.float32, out=out)
        out *= np.float32(high - low)
        out += np.float32(low)

    return draw
