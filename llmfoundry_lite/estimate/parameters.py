"""Shapes of a model's parameters on one device, and how many elements of them the device has. Arithmetic, no torch."""

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.own_code import is_own

Shapes = list[tuple[int, int]]
"""Rows, which FSDP divides, and columns of each parameter. A vector has one column."""


def count_share(shapes: Shapes, degree: int) -> int:
    """Count the elements of parameters on one of `degree` devices that divide the rows of each parameter, rounded up.

    For a parameter of 10 rows and 4 columns on 4 devices, that is 3 rows, or 12 elements.
    """
    return sum(-(-rows // degree) * columns for rows, columns in shapes)


def count_rounding(portion: Portion) -> int:
    """Count bytes by which torch's allocator rounds up the blocks' shares.

    From each 20 MiB that it cuts into tensors of 1 to 10 MiB, it gives the last one up to 1 MiB more
    (c10/cuda/CUDACachingAllocator: kLargeBuffer, kSmallSize).
    """
    sizes = [FP32_BYTES * count_share([shape], portion.shard_degree) for shape in shapes_of_block(portion)]
    return portion.model.n_layers * sum(size // 20 for size in sizes if MIB < size < 10 * MIB)


def shapes_outside_blocks(portion: Portion) -> Shapes:
    """Return the shapes of embeddings and last norm on one device of a tensor group, which divides the vocabulary."""
    model = portion.model
    d = model.d_model
    num_vocab_embeddings = 1 if model.tie_word_embeddings else 2  # at the input and at the output
    shapes = [(portion.num_vocab_rows, d)] * num_vocab_embeddings
    if model.uses_learned_positions:
        shapes.append((model.max_seq_len, d))
    return shapes + _shapes_of_norm(model, d, model.norm_type)


def shapes_of_block(portion: Portion) -> Shapes:
    """Return the shapes of a block's parameters on one device of a tensor group.

    The group divides everything but norms, and the biases of matrices whose output is added to the residual stream.
    """
    model = portion.model
    d = model.d_model
    q_dim = model.q_dim
    kv_dim = model.kv_dim
    attn_config = model.attn_config
    tensor_degree = portion.layout.tensor

    # List the matrices. Those that read the stream are divided by rows, and those that write to it by columns.
    if attn_config.fused_qkv:
        qkv_rows = [(q_dim + 2 * kv_dim) // tensor_degree]
    else:
        qkv_rows = [q_dim // tensor_degree, kv_dim // tensor_degree, kv_dim // tensor_degree]
    up_rows = [model.ffn_dim // tensor_degree] * portion.num_up_matrices
    attention_shapes = [(rows, d) for rows in qkv_rows]
    attention_shapes.append((d, q_dim // tensor_degree))  # out_proj
    ffn_shapes = [(rows, d) for rows in up_rows]
    ffn_shapes.append((d, model.ffn_dim // tensor_degree))  # down_proj

    # List the biases.
    if model.has_qkv_bias:
        attention_shapes += [(rows, 1) for rows in qkv_rows]
    if not model.no_bias:
        attention_shapes.append((d, 1))
        ffn_shapes += [(rows, 1) for rows in (*up_rows, d)]

    # List the norms: those of queries and keys, if any, one before attention, and one before the feed-forward layer.
    if attn_config.qk_ln:
        attention_shapes += _shapes_of_norm(model, q_dim, attn_config.norm_type)
        attention_shapes += _shapes_of_norm(model, kv_dim, attn_config.norm_type)
    elif attn_config.qk_gn:
        attention_shapes += _shapes_of_norm(model, model.head_dim, attn_config.norm_type) * 2
    shapes = _shapes_of_norm(model, d, model.norm_type) * 2

    # Nothing is known of layers of the user's own.
    if not is_own(attn_config.attn_type):
        shapes += attention_shapes
    if not is_own(model.ffn_config.ffn_type):
        shapes += ffn_shapes
    return shapes


def _shapes_of_norm(model: ModelConfig, width: int, norm_type: str) -> Shapes:
    """Return the shapes of a norm's weight, and of its bias if it has one. A norm of the user's own counts as none."""
    if is_own(norm_type):
        return []
    has_bias = not model.no_bias and not norm_type.endswith("rmsnorm")
    return [(width, 1)] * (2 if has_bias else 1)
