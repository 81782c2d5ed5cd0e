"""The `model` block of a YAML, with LLM Foundry's names of keys: the shape of an MPT model and its initialisation.

`ModelConfig` is the block, and the other dataclasses are the blocks inside it. Each has a method `problems`, which
checks its keys against each other. The properties at the end of `ModelConfig` are sizes that follow from the keys.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.config.fields import (
    NON_NEGATIVE,
    NOT_GIVEN_TO_OWN,
    POSITIVE,
    PROBABILITY,
    Use,
    as_yaml,
    is_number,
    only_with,
    only_with_own,
    setting,
    validator,
    without_empty,
)
from llmfoundry_lite.config.mup import MupConfig
from llmfoundry_lite.errors import join_with_or
from llmfoundry_lite.own_code import is_own

MIN_FLEX_HEAD_DIM = 16
"""Least dimension of a head in FlexAttention's kernels. It is the smallest matrix product of Triton."""
LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of rope_hf_config that only the type llama3 reads."""
NORMS = "low_precision_layernorm layernorm low_precision_rmsnorm rmsnorm python:"
ATTENTION_TYPES = "multihead_attention grouped_query_attention multiquery_attention python:"
FFN_TYPES = "mptmlp mptglu python:"
RECORDED_IF_GIVEN = (
    *("norm_kwargs", "attn_config.kwargs", "attn_config.norm_kwargs", "ffn_config.kwargs", "loss_kwargs", "mup"),
)
"""Keys of the block `model` that a record has only if they are given, because earlier releases do not know them."""
MAX_TRIED_DIVISOR = 2**20
"""Largest number that `divisors` tries, because a YAML may have any number and a longer search would take seconds."""


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending: [1, 2, 3, 6] for 6.

    For numbers above 2**40, only divisors up to MAX_TRIED_DIVISOR, and the number divided by each of them, are found.
    """
    largest_tried = min(math.isqrt(number), MAX_TRIED_DIVISOR)
    small = [n for n in range(1, largest_tried + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return small + large


def _is_init_limit(value: Any) -> bool:
    """Return whether a value is valid for emb_init_uniform_lim: a number of 0 or more, or a list [lower, upper]."""
    if isinstance(value, list):
        are_limits = len(value) == 2 and all(is_number(limit) for limit in value)
        return are_limits and value[0] <= value[1]
    return is_number(value) and value >= 0


def _is_residual_divisor(value: Any) -> bool:
    """Return whether a value is valid for init_div_is_residual: true, false, or a number above 0, also as text."""
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        return False
    return isinstance(value, bool) or float(value) > 0


# A checkpoint binds a run to all keys of its model, also to those without effect. A run that has such a key must be
# able to resume, so keys of a model that have no effect are noted and never refused.


@dataclass(kw_only=True, slots=True, frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the trained length."""

    type: str = setting(
        "no_scaling",
        choices="no_scaling linear dynamic ntk llama3",
        instead="expected no_scaling, linear, dynamic, ntk or llama3",
        uses=(Use(has_effect=lambda _, run: run.model.attn_config.rope, reason="model.attn_config.rope is false"),),
    )
    """linear: positions / factor. dynamic: theta grows with the sequence beyond max_seq_len. ntk: theta is raised by
    the factor from the start. llama3: only slow frequencies are divided by the factor."""
    factor: float = setting(1.0, POSITIVE, validator("1 or more", lambda value: value >= 1))
    low_freq_factor: float = setting(1.0, POSITIVE)
    """llama3: a frequency with fewer turns over the original length is divided by the factor."""
    high_freq_factor: float = setting(4.0, POSITIVE)
    """llama3: a frequency with more turns stays as it is; between the two it is mixed."""
    original_max_position_embeddings: int = setting(8192, POSITIVE)
    """llama3: tokens of the length that was trained before."""

    def problems(self) -> Iterator[str]:
        """Yield `key: what is wrong` for each key that does not go with another one."""
        if self.factor != 1.0 and self.type == "no_scaling":
            yield "factor: given without a type; add type: linear, dynamic, ntk or llama3"
        for key in LLAMA3_KEYS:
            if self.type != "llama3" and getattr(self, key) != getattr(RopeScaling(), key):
                yield f"{key}: given for type {self.type}; only llama3 has it"
        if self.high_freq_factor <= self.low_freq_factor:
            yield (
                f"high_freq_factor: {self.high_freq_factor} given, expected more than low_freq_factor, "
                f"{self.low_freq_factor}"
            )


ROPE = (Use(has_effect=lambda attention, _: attention.rope, reason="{path}.rope is false"),)
NORMS_OF_Q_AND_K = (
    Use(
        has_effect=lambda attention, _: attention.qk_ln or attention.qk_gn,
        reason="q and k have norms only with qk_ln or qk_gn; model.norm_type and model.norm_eps are for all others",
    ),
)
OWN_NORM = only_with_own("norm", "norm_type")
OWN_LOSS = only_with_own("loss", "loss_fn")
OWN_ATTENTION = only_with_own("attention", "attn_type")
OWN_FFN = only_with_own("ffn_type", "ffn_type")
NOT_FOR_OWN_FFN = f"{{block.ffn_type}} is not given it; {NOT_GIVEN_TO_OWN}"
OF_OUR_FFN = (
    Use(has_effect=lambda ffn, _: not is_own(ffn.ffn_type), reason=NOT_FOR_OWN_FFN, is_refused=True),
    # A record has the defaults, so these are only noted.
    Use(has_effect=lambda ffn, _: not is_own(ffn.ffn_type), reason=NOT_FOR_OWN_FFN, even_default=True),
)


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionConfig:
    """Attention and positions."""

    attn_type: str = setting("multihead_attention", choices=ATTENTION_TYPES)
    """python:package.module:Thing is a class of your own, for the whole layer of attention."""
    kv_n_heads: int | None = setting(None, POSITIVE)
    """grouped_query_attention: heads of keys and values, each shared by n_heads / kv_n_heads heads of queries."""
    attn_pdrop: float = setting(0.0, PROBABILITY)
    """Dropout of attention probabilities."""
    attn_impl: str = setting(
        "auto", choices="auto sdpa blocked flex flash reference torch python:", hardware=True, shapes_dropout=True
    )
    """flash: the flash-attn package where it is installed, else what auto chooses. LLM Foundry's torch is sdpa.
    python:package.module:Thing is a function of your own, which then belongs to the model and never changes."""
    fused_qkv: bool = True
    """One matrix for q, k and v, under every layout; tensor parallelism divides it by heads."""
    head_dim: int | None = setting(None, POSITIVE)
    """Width of a head; default: d_model / n_heads."""
    qkv_bias: bool | None = None
    """Whether q, k and v have biases. Default: the opposite of no_bias."""
    qk_ln: bool = False
    """Apply a norm to all of q, and to all of k, before heads are split."""
    qk_gn: bool = False
    """Apply a norm to each head of q and of k."""
    norm_type: str = setting("low_precision_layernorm", choices=NORMS, uses=NORMS_OF_Q_AND_K)
    """Kind of norm that qk_ln and qk_gn compute. As in LLM Foundry, it does not follow model.norm_type."""
    norm_eps: float = setting(1e-5, POSITIVE, uses=NORMS_OF_Q_AND_K)
    """Number that the norms of q and k add to the variance."""
    norm_kwargs: dict[str, Any] = setting(dict, uses=(OWN_NORM,))
    """Arguments of a `python:` norm of q and k."""
    clip_qkv: float | None = setting(None, POSITIVE)
    """Clamp q, k and v to [-clip_qkv, clip_qkv]."""
    softmax_scale: float | None = setting(None, POSITIVE)
    """Default 1/sqrt(head dimension)."""
    sliding_window_size: int = setting(
        -1, validator("a number of tokens above 0, or -1 to see all", lambda value: value > 0 or value == -1)
    )
    """Number of earlier tokens that a token sees; -1 for all."""
    attn_uses_sequence_id: bool = False
    """Keep documents that are packed into one sample from seeing each other. They are divided by the tokenizer's end of
    text, or by eos_token_id or bos_token_id of train_loader.dataset."""
    alibi: bool = False
    """Use linear distance biases instead of learned positions."""
    alibi_bias_max: int = setting(
        8, POSITIVE, uses=(Use(has_effect=lambda attention, _: attention.alibi, reason="{path}.alibi is false"),)
    )
    """Number that sets ALiBi's steepest slope, 2**-(alibi_bias_max / heads)."""
    rope: bool = False
    """Use rotary positions instead of learned ones."""
    rope_theta: float = setting(10_000, POSITIVE, uses=ROPE)
    """Base of the rotary frequencies: the longest wavelength is 2 * pi * theta tokens."""
    rope_impl: str = setting("dail", choices="dail hf", uses=ROPE)
    """LLM Foundry's two implementations. Here they compute the same; only hf reads rope_hf_config."""
    rope_hf_config: RopeScaling = setting(RopeScaling)
    """Scaling beyond the trained length."""
    kwargs: dict[str, Any] = setting(dict, uses=(OWN_ATTENTION,))
    """Arguments of a `python:` attention. Keys beside attn_type that are not listed here are such arguments, too."""

    def problems(self, n_heads: int, num_kv_heads: int, head_dim: int) -> Iterator[str]:
        """Yield `key: what is wrong` for each key that does not go with another one, or with the model's heads.

        `n_heads` is the number of heads of queries, `num_kv_heads` that of keys and values, and `head_dim` their width.
        """
        # Heads of keys and values.
        if self.attn_type == "grouped_query_attention" and self.kv_n_heads is None:
            yield "kv_n_heads: missing; grouped_query_attention needs the number of heads of k and v"
        if self.kv_n_heads not in (None, num_kv_heads):
            yield (
                f"kv_n_heads: {self.kv_n_heads} given, but {self.attn_type} has {num_kv_heads}; remove it, or use "
                "attn_type: grouped_query_attention"
            )
        if n_heads % num_kv_heads:
            yield (
                f"kv_n_heads: {num_kv_heads} does not divide n_heads, {n_heads}; use one of "
                f"{join_with_or(divisors(n_heads))}"
            )
        if self.qk_ln and self.qk_gn:
            yield "qk_gn: both qk_ln and qk_gn given; use one of them"

        # Kernels.
        if self.attn_impl in ("blocked", "flex") and self.attn_pdrop:
            yield f"attn_impl: {self.attn_impl} has no attn_pdrop; use sdpa, or attn_pdrop: 0"
        if self.attn_impl == "flex" and head_dim < MIN_FLEX_HEAD_DIM:
            yield (
                f"attn_impl: flex needs heads of {MIN_FLEX_HEAD_DIM} dimensions or more, and these have {head_dim}; "
                "use auto or sdpa"
            )

        # Positions.
        if self.alibi and self.rope:
            yield "rope: both alibi and rope given; use one of them"
        if self.rope and head_dim % 2:
            yield f"rope: turns pairs of dimensions, and a head has {head_dim}, odd"
        scaling = self.rope_hf_config.type
        if self.rope and self.rope_impl == "dail" and scaling != "no_scaling":
            yield f"rope_impl: dail has no {scaling} scaling; use rope_impl: hf"
        for problem in self.rope_hf_config.problems():
            yield f"rope_hf_config.{problem}"


@dataclass(kw_only=True, slots=True, frozen=True)
class FFNActivation:
    """The activation function of the feed-forward network."""

    name: str = setting("gelu", choices="gelu quick_gelu relu silu")
    approximate: str = setting("none", choices="none tanh")
    """Approximation of gelu; none is exact."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FFNConfig:
    """The feed-forward network of each block."""

    ffn_type: str = setting(
        "mptmlp",
        choices=FFN_TYPES,
        instead="mixture of experts and TransformerEngine layers are left out; use mptmlp, mptglu or python:",
    )
    """mptglu: down(act(gate(x)) * up(x)). python:package.module:Thing is one of your own."""
    ffn_act_fn: FFNActivation = setting(FFNActivation, uses=OF_OUR_FFN)
    ffn_hidden_size: int | None = setting(None, POSITIVE, uses=OF_OUR_FFN)
    """Width of the feed-forward layer; default: expansion_ratio * d_model."""
    kwargs: dict[str, Any] = setting(dict, uses=(OWN_FFN,))
    """Arguments of a `python:` ffn_type. Keys beside it that are not listed here are such arguments, too."""


KAIMING = (only_with("kaiming_normal_", "kaiming_uniform_", is_refused=False),)


@dataclass(kw_only=True, slots=True, frozen=True)
class InitConfig:
    """How weights are drawn before training."""

    name: str = setting(
        "kaiming_normal_",
        choices="kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_ small_init_ neox_init_ baseline_ "
        "default_",
    )
    fan_mode: str = setting("fan_in", choices="fan_in fan_out", uses=KAIMING)
    """Fan that kaiming scales by."""
    init_nonlinearity: str = setting("relu", choices="relu leaky_relu linear tanh sigmoid selu", uses=KAIMING)
    """Nonlinearity that decides kaiming's gain."""
    init_div_is_residual: int | float | bool | str = setting(
        True,
        validator("true, false or a number above 0", _is_residual_divisor),
        uses=(
            Use(
                has_effect=lambda init, _: init.name not in ("neox_init_", "default_"),
                reason="{block.name} has its own scale for these weights",
            ),
        ),
    )
    """Number to divide the weights that write into the residual stream by; true stands for sqrt(2 * n_layers)."""
    emb_init_std: float | None = setting(None, NON_NEGATIVE)
    """Embeddings from N(0, std) instead of the scheme above."""
    emb_init_uniform_lim: Any = setting(
        None,
        validator("a number of 0 or more, or the lower and the upper limit in a list", _is_init_limit),
        uses=(
            Use(
                has_effect=lambda init, _: init.emb_init_std is None,
                reason="{path}.emb_init_std takes precedence",
            ),
        ),
    )
    """Embeddings from U(-lim, lim), or U(a, b) for a pair."""
    init_std: float | None = setting(None, POSITIVE, uses=(only_with("baseline_", is_refused=False),))
    """Standard deviation of baseline_, which needs it."""
    init_gain: float = setting(
        0.0,
        NON_NEGATIVE,
        uses=(
            Use(
                has_effect=lambda init, _: init.name.startswith(("kaiming", "xavier")),
                reason="only kaiming and xavier have a gain, and {path}.name is {block.name}",
            ),
        ),
    )
    """Negative slope for kaiming, or gain for xavier (0 stands for 1)."""

    def problems(self) -> Iterator[str]:
        """Yield `key: what is wrong` for each key that does not go with another one."""
        if self.name == "baseline_" and self.init_std is None:
            yield "init_std: missing; baseline_ draws weights from N(0, init_std)"
        for key in ("emb_init_std", "emb_init_uniform_lim"):
            if self.name == "default_" and getattr(self, key) is not None:
                yield f"{key}: default_ draws embeddings from N(0, 1); remove it or use another scheme"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    """The shape of an MPT model."""

    name: str = setting(
        "mpt_causal_lm",
        choices="mpt_causal_lm",
        instead="expected mpt_causal_lm; for a Hugging Face model `llmfoundry-lite init DATA --like hf:NAME` writes "
        "YAML and weights",
    )
    d_model: int = setting(2048, POSITIVE)
    n_heads: int = setting(16, POSITIVE)
    n_layers: int = setting(24, POSITIVE)
    expansion_ratio: int | float = setting(
        4,
        POSITIVE,
        uses=(
            Use(
                has_effect=lambda model, _: model.ffn_config.ffn_hidden_size is None,
                reason="{path}.ffn_config.ffn_hidden_size takes precedence",
            ),
        ),
    )
    """Width of the feed-forward layer over d_model; ffn_config.ffn_hidden_size takes precedence."""
    max_seq_len: int = setting(2048, POSITIVE)
    """Tokens."""
    vocab_size: int = setting(50368, POSITIVE)
    """Rows of the embedding; at least the tokenizer's."""
    resid_pdrop: float = setting(0.0, PROBABILITY)
    emb_pdrop: float = setting(0.0, PROBABILITY)
    learned_pos_emb: bool = True
    """Ignored, as in LLM Foundry, when attn_config.alibi or attn_config.rope is on."""
    embedding_fraction: float = setting(1.0, validator("a share, 0 < share <= 1", lambda value: 0 < value <= 1))
    """Factor of the embeddings' gradient."""
    attn_config: AttentionConfig = setting(AttentionConfig)
    ffn_config: FFNConfig = setting(FFNConfig)
    init_config: InitConfig = setting(InitConfig, change="freely")
    init_device: str = setting(
        "meta",
        choices="meta cpu mixed",
        hardware=True,
        uses=(Use(has_effect=lambda _, run: False, reason="every weight is made where it lives"),),
    )
    """Accepted for LLM Foundry's sake. Weights are always made shard by shard, where they live."""
    logit_scale: float | str | None = setting(
        None,
        validator(
            "a number or inv_sqrt_d_model", lambda value: not isinstance(value, str) or value == "inv_sqrt_d_model"
        ),
    )
    no_bias: bool = False
    norm_type: str = setting(
        "low_precision_layernorm",
        choices=NORMS,
        instead="use rmsnorm or low_precision_rmsnorm, layernorm or low_precision_layernorm, or python:",
    )
    """Kind of norm. layernorm and rmsnorm compute in fp32, the low_precision ones in the compute precision."""
    norm_eps: float = setting(1e-5, POSITIVE)
    norm_kwargs: dict[str, Any] = setting(dict, uses=(OWN_NORM,))
    """Arguments of a `python:` norm."""
    tie_word_embeddings: bool = True
    mup: MupConfig | None = None
    """Scale initial weights, learning rates and logits with the width, so that a learning rate found for a narrow model
    is right for a wide one (docs/mup.md)."""
    loss_fn: str = setting(
        "auto",
        choices="auto fused_crossentropy torch_crossentropy python:",
        change="freely",
        uses=(
            Use(
                has_effect=lambda model, _: is_own(model.loss_fn),
                reason="all choices but python: are the same chunked loss",
            ),
        ),
    )
    """python:package.module:Thing is a loss of your own, which the run trains with. The others are accepted for LLM
    Foundry's sake: all are the same chunked cross-entropy here."""
    loss_kwargs: dict[str, Any] = setting(dict, uses=(OWN_LOSS,))
    """Arguments of a `python:` loss."""

    def problems(self) -> Iterator[str]:
        """Yield `key: what is wrong` for each key that does not go with another one, here and in the blocks inside.

        For example, `n_heads: 3 does not divide d_model, 64; the nearest that does is 4`.
        """
        if self.attn_config.head_dim is None and self.d_model % self.n_heads:
            nearest = min(divisors(self.d_model), key=lambda n: abs(n - self.n_heads))
            yield f"n_heads: {self.n_heads} does not divide d_model, {self.d_model}; the nearest that does is {nearest}"
        for problem in self.attn_config.problems(self.n_heads, self.num_kv_heads, self.head_dim):
            yield f"attn_config.{problem}"

        ffn_dim = self.d_model * self.expansion_ratio
        is_ours = not is_own(self.ffn_config.ffn_type)
        if is_ours and self.ffn_config.ffn_hidden_size is None and ffn_dim != int(ffn_dim):
            yield (
                f"expansion_ratio: {self.expansion_ratio} x d_model, {self.d_model}, is no whole number; the nearest "
                f"that gives one is {max(1, round(ffn_dim)) / self.d_model}"
            )
        activation = self.ffn_config.ffn_act_fn
        if activation.approximate != "none" and activation.name != "gelu":
            yield (
                f"ffn_config.ffn_act_fn.approximate: {activation.approximate} given, but name is {activation.name}, "
                "and only gelu is approximated; remove it"
            )
        if self.logit_scale == 0:
            yield "logit_scale: 0 given, which makes every token as likely as any other; remove it or give a number"
        for problem in self.init_config.problems():
            yield f"init_config.{problem}"
        if self.mup is not None and self.attn_config.head_dim is None and self.mup.base_width % self.base_head_dim:
            yield (
                f"mup.base_head_dim: the base model, of width {self.mup.base_width}, has no whole number of heads of "
                f"{self.base_head_dim}; give the width of its heads"
            )

    @property
    def own_parts(self) -> dict[str, str]:
        """Dotted key in this block -> import path, for each part of the model that is the user's own code."""
        names = {
            "norm_type": self.norm_type,
            "attn_config.attn_type": self.attn_config.attn_type,
            "attn_config.attn_impl": self.attn_config.attn_impl,
            "attn_config.norm_type": self.attn_config.norm_type,
            "ffn_config.ffn_type": self.ffn_config.ffn_type,
        }
        return {key: name for key, name in names.items() if is_own(name)}

    @property
    def uses_learned_positions(self) -> bool:
        """Whether the model has a learned embedding of positions, which alibi and rope replace."""
        return self.learned_pos_emb and not (self.attn_config.alibi or self.attn_config.rope)

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values. A missing kv_n_heads, which `problems` refuses, counts as n_heads."""
        if self.attn_config.attn_type == "multihead_attention":
            return self.n_heads
        if self.attn_config.attn_type == "multiquery_attention":
            return 1
        return self.attn_config.kv_n_heads or self.n_heads

    @property
    def num_matrix_parameters(self) -> int:
        """Approximate number of parameters, of embedding and blocks; `models.flops` counts exactly.

        A block has about 12 d_model² parameters: 4 in attention, and 8 in a feed-forward network of width 4 d_model.
        """
        return self.vocab_size * self.d_model + 12 * self.n_layers * self.d_model**2

    @property
    def head_dim(self) -> int:
        """Width of each head."""
        return self.attn_config.head_dim or self.d_model // self.n_heads

    @property
    def q_dim(self) -> int:
        """Width of all queries together."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys together; the values have the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def width_mult(self) -> float:
        """Width over that of muP's base model; 1 without muP."""
        return 1.0 if self.mup is None else self.d_model / self.mup.base_width

    @property
    def base_head_dim(self) -> int:
        """Width of each head in muP's base model; as here without muP."""
        base_head_dim = None if self.mup is None else self.mup.base_head_dim
        return base_head_dim or self.head_dim

    @property
    def softmax_scale(self) -> float | None:
        """Factor of the products of queries and keys; None for 1 / sqrt(head dimension).

        With muP, `attn_config.softmax_scale` or its default is the base model's, and wider heads divide it.
        """
        scale = self.attn_config.softmax_scale
        if self.base_head_dim == self.head_dim:
            return scale
        if scale is None:
            scale = 1.0 / math.sqrt(self.base_head_dim)
        return scale * self.base_head_dim / self.head_dim

    @property
    def logit_multiplier(self) -> float | None:
        """Factor of the logits; None leaves them as they are. With muP, `logit_scale` is that of the base model."""
        scale = self.logit_scale
        if isinstance(scale, str):  # inv_sqrt_d_model, the only name that the configuration accepts
            scale = 1.0 / math.sqrt(self.d_model / self.width_mult)
        if self.width_mult == 1:
            return scale
        return (1.0 if scale is None else scale) / self.width_mult

    @property
    def embedding_multiplier(self) -> float:
        """Factor of the embeddings where they enter the first block."""
        return 1.0 if self.mup is None else self.mup.embedding_mult

    def stacked_rows(self, name: str) -> tuple[int, ...]:
        """Return the numbers of rows of q, k and v in the parameter `name`, if it stacks them in one matrix.

        For `blocks.0.attn.Wqkv.weight` this is (q_dim, kv_dim, kv_dim). For other parameters it is empty. Attention
        of the user's own has such a matrix only if its class is derived from ours (`mpt.has_attention_of_ours`).
        """
        is_stacked = ".Wqkv." in name
        return (self.q_dim, self.kv_dim, self.kv_dim) if is_stacked else ()

    @property
    def has_plain_attention(self) -> bool:
        """Whether attention is causal without alibi, window or document mask, so that kernels need no bias or mask."""
        options = self.attn_config
        return not (options.alibi or options.sliding_window_size >= 0 or options.attn_uses_sequence_id)

    @property
    def flex_refusal(self) -> str:
        """Reason why FlexAttention cannot train this model on a GPU; empty if it can."""
        if self.attn_config.attn_pdrop:
            return "flex has no dropout"
        if self.head_dim < MIN_FLEX_HEAD_DIM:
            return f"flex has no kernel for heads of fewer than {MIN_FLEX_HEAD_DIM} dimensions"
        return ""

    @property
    def has_qkv_bias(self) -> bool:
        """Whether q, k and v have a bias: by attn_config.qkv_bias, or else like all other layers (no_bias)."""
        if self.attn_config.qkv_bias is not None:
            return self.attn_config.qkv_bias
        return not self.no_bias

    @property
    def ffn_dim(self) -> int:
        """Width of the hidden layer of the feed-forward network; 0 for one of the user's own, which is not known."""
        if is_own(self.ffn_config.ffn_type):
            return 0
        return self.ffn_config.ffn_hidden_size or int(self.d_model * self.expansion_ratio)


def as_record(config: ModelConfig) -> dict[str, Any]:
    """Return a model's configuration as a manifest records it.

    A model without parts of the user's own and without muP is recorded as releases did that had none, so that they can
    read it.
    """
    return without_empty(as_yaml(config), RECORDED_IF_GIVEN)
