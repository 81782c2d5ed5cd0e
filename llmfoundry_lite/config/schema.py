"""A dataclass for every block of a training or evaluation YAML, in LLM Foundry's words; values and defaults.

`load_train.py` and `load_eval.py` fill these from files and `key=value` arguments and check them; everybody else only
reads them. They are frozen: what was validated once, before any device was touched, stays true.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

TIME_UNITS = ("ba", "ep", "sp", "tok")
LARGEST_REPLICATED = 1.5e9
"""Parameters up to which every device has the whole model by default: with gradients and AdamW 24 GB in fp32."""


@dataclass(frozen=True, slots=True)
class Duration:
    """A span of training: `4800ba`, `1ep`, `2.5e9tok`, `1000sp`, or a fraction of the run, `0.1dur`."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str | int, units: Sequence[str] = (*TIME_UNITS, "dur")) -> "Duration":
        """Read `4800ba`; a bare integer counts epochs, as in Composer. Raises ValueError, saying what was expected."""
        if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
            return cls(text, "ep")
        match = re.fullmatch(r"\s*([0-9_]+(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([a-z]+)\s*", str(text))
        if match is None or match[2] not in units:
            raise ValueError(describe_span(units))
        value = float(match[1].replace("_", ""))
        if not math.isfinite(value):
            raise ValueError("a finite number")
        if match[2] != "dur" and value != int(value):
            raise ValueError(f"a whole number of {match[2]}")
        return cls(value if match[2] == "dur" else int(value), match[2])

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """A span of training, a time, or neither: `auto`."""

    span: Duration | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str | int) -> "SaveInterval":
        """Read `1000ba`, `5m`, `90s`, `1h30m` or `auto`. Raises ValueError, saying what was expected."""
        if text == "auto":
            return cls()
        is_time = isinstance(text, str) and re.fullmatch(r"\s*(\d+(\.\d+)?[dhms]\s*)+", text)
        try:
            found = cls(seconds=parse_seconds(text)) if is_time else cls(span=Duration.parse(text, TIME_UNITS))
        except ValueError:
            raise ValueError("a span such as 1000ba, a time such as 5m, 90s or 1h, or auto") from None
        if (found.span.value if found.span else found.seconds) == 0:
            raise ValueError("more than 0")
        return found


def describe_span(units: Sequence[str]) -> str:
    """What is expected of a span in one of these units."""
    *others, last = units
    return f"a number with a unit, {', '.join(others)} or {last}, such as 100{units[0]}"


def parse_seconds(time: str | int | float) -> float:
    """`3h55m`, `3:55:00` or a number of seconds. Raises ValueError saying what was expected."""
    text = str(time).strip()
    units = re.fullmatch(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s?)?", text)
    clock = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    match = clock or units
    if match is None or not any(match.groups()):
        raise ValueError("a time such as 3h55m, 90s, 3:55:00 or a number of seconds")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


# ---------------------------------------------------------------------------------------------- model


@dataclass(kw_only=True, slots=True, frozen=True)
class RopeScaling:
    type: str = "no_scaling"
    """no_scaling, linear (positions / factor), dynamic (theta grows with the sequence beyond max_seq_len), ntk (theta
    raised by the factor from the start) or llama3 (slow frequencies alone / factor)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """llama3: what turns less often than so over the original length is divided by the factor."""
    high_freq_factor: float = 4.0
    """llama3: what turns more often than so stays as it is; between the two it is mixed."""
    original_max_position_embeddings: int = 8192
    """llama3: the length that was trained before."""


FLEX_HEAD_DIM = 16
"""FlexAttention's kernels need heads as wide as that (Triton's smallest product)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionConfig:
    attn_type: str = "multihead_attention"
    """multihead_attention, grouped_query_attention or multiquery_attention"""
    kv_n_heads: int | None = None
    """grouped_query_attention: heads of keys and values, each shared by n_heads / kv_n_heads heads of queries."""
    attn_pdrop: float = 0.0
    """Dropout of attention probabilities, 0 to 1."""
    attn_impl: str = "auto"
    """auto, sdpa, blocked, flex, flash (the flash-attn package where it is installed, else what auto chooses),
    reference; LLM Foundry's torch is sdpa. How to compute, not what: a checkpoint does not depend on it."""
    fused_qkv: bool = True
    """One matrix for q, k and v, under every layout; tensor parallelism divides it by heads."""
    qk_ln: bool = False
    """Norm over the whole of q and of k, before heads are split."""
    qk_gn: bool = False
    """Norm over each head of q and of k."""
    norm_type: str = "low_precision_layernorm"
    """Kind of norm that qk_ln and qk_gn compute. As in LLM Foundry, it does not follow model.norm_type."""
    norm_eps: float = 1e-5
    """Added to the variance by the norms of q and k."""
    clip_qkv: float | None = None
    """Clamp q, k and v to [-clip_qkv, clip_qkv]."""
    softmax_scale: float | None = None
    """Default 1/sqrt(head dimension)."""
    sliding_window_size: int = -1
    """A token sees so many tokens before itself; -1 for all."""
    attn_uses_sequence_id: bool = False
    """Documents packed in one sample do not see each other; they end where the tokenizer's end of text stands, or where
    eos_token_id or bos_token_id of train_loader.dataset says."""
    alibi: bool = False
    """Linear distance bias instead of learned positions."""
    alibi_bias_max: int = 8
    """The steepest slope is 2**-(alibi_bias_max / heads)."""
    rope: bool = False
    """Rotary positions instead of learned ones."""
    rope_theta: float = 10_000
    """The longest wavelength is 2 * pi * theta tokens."""
    rope_impl: str = "dail"
    """dail or hf: LLM Foundry's two implementations, the same here but that hf alone has rope_hf_config."""
    rope_hf_config: RopeScaling = field(default_factory=RopeScaling)
    """Scaling beyond the trained length."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FFNActivation:
    name: str = "gelu"
    """gelu, quick_gelu, relu or silu"""
    approximate: str = "none"
    """gelu: none (exact) or tanh."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FFNConfig:
    ffn_type: str = "mptmlp"
    """mptmlp, or mptglu: down(act(gate(x)) * up(x))"""
    ffn_act_fn: FFNActivation = field(default_factory=FFNActivation)
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer; default: expansion_ratio * d_model."""


@dataclass(kw_only=True, slots=True, frozen=True)
class InitConfig:
    name: str = "kaiming_normal_"
    """kaiming_normal_, kaiming_uniform_, xavier_normal_, xavier_uniform_, small_init_, neox_init_, baseline_,
    default_"""
    fan_mode: str = "fan_in"
    """fan_in or fan_out (kaiming)."""
    init_nonlinearity: str = "relu"
    """For kaiming's gain: relu, leaky_relu, linear, tanh, sigmoid, selu."""
    init_div_is_residual: int | float | bool | str = True
    """Divide the weights that write into the residual stream: true for sqrt(2 * n_layers), or by a number."""
    emb_init_std: float | None = None
    """Embeddings from N(0, std) instead of the scheme above."""
    emb_init_uniform_lim: Any = None
    """Embeddings from U(-lim, lim), or U(a, b) for a pair."""
    init_std: float | None = None
    """Needed by baseline_."""
    init_gain: float = 0.0
    """kaiming's negative slope, xavier's gain (0 stands for 1)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    name: str = "mpt_causal_lm"
    """mpt_causal_lm"""
    d_model: int = 2048
    n_heads: int = 16
    n_layers: int = 24
    expansion_ratio: int | float = 4
    """Width of the feed-forward layer over d_model; ffn_config.ffn_hidden_size goes before it."""
    max_seq_len: int = 2048
    """Tokens."""
    vocab_size: int = 50368
    """Rows of the embedding; at least the tokenizer's."""
    resid_pdrop: float = 0.0
    emb_pdrop: float = 0.0
    learned_pos_emb: bool = True
    """Ignored, as in LLM Foundry, when attn_config.alibi or attn_config.rope is on."""
    embedding_fraction: float = 1.0
    """Share of the embeddings' gradient that is used."""
    attn_config: AttentionConfig = field(default_factory=AttentionConfig)
    ffn_config: FFNConfig = field(default_factory=FFNConfig)
    init_config: InitConfig = field(default_factory=InitConfig)
    init_device: str = "meta"
    """meta, cpu or mixed: accepted for LLM Foundry's sake. Weights are always made shard by shard, where they live."""
    logit_scale: float | str | None = None
    """A number, or inv_sqrt_d_model."""
    no_bias: bool = False
    norm_type: str = "low_precision_layernorm"
    """layernorm and rmsnorm (in fp32), low_precision_layernorm and low_precision_rmsnorm (in the compute precision)."""
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    loss_fn: str = "auto"
    """auto, or LLM Foundry's fused_crossentropy and torch_crossentropy: all are the same chunked loss here."""

    @property
    def uses_learned_positions(self) -> bool:
        return self.learned_pos_emb and not (self.attn_config.alibi or self.attn_config.rope)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        kinds = {"multihead_attention": self.n_heads, "multiquery_attention": 1}
        return kinds.get(self.attn_config.attn_type) or self.attn_config.kv_n_heads or self.n_heads

    @property
    def num_matrix_parameters(self) -> int:
        """About how large the model is; `models.flops` counts exactly."""
        return self.vocab_size * self.d_model + 12 * self.n_layers * self.d_model**2

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def ffn_dim(self) -> int:
        return self.ffn_config.ffn_hidden_size or int(self.d_model * self.expansion_ratio)


# ----------------------------------------------------------------------------------------------- data


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenizerConfig:
    name: str
    """A local folder, or a name on the Hub."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """LLM Foundry's options; only model_max_length is used by anything (a check against max_seq_len)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StreamConfig:
    local: str | None = None
    remote: str | None = None
    split: str | None = None
    proportion: float | None = None
    """Share of this stream in an epoch; given for all streams or for none."""
    repeat: float | None = None
    """Times this stream is seen in an epoch."""
    choose: int | None = None
    """Samples of this stream in an epoch."""
    download_retry: int | None = None
    """This and the next three: default, the data set's."""
    download_timeout: float | None = None
    validate_hash: str | None = None
    keep_zip: bool | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class TextDatasetConfig:
    local: str | None = None
    """Folder of an MDS data set, or where a remote one is cached."""
    remote: str | None = None
    split: str | None = None
    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """Several data sets, mixed; keys are names of your choice."""
    shuffle: bool = False
    shuffle_seed: int = 9176
    shuffle_block_size: int | None = None
    """Samples shuffled together, over the whole world; default 4,000,000."""
    max_seq_len: int | None = None
    """Tokens; default: the run's."""
    epoch_size: int | str | None = None
    predownload: int | None = None
    cache_limit: int | str | None = None
    """Bytes, or 100gb. Only copies of a remote are given up."""
    download_retry: int = 2
    download_timeout: float = 60
    """Seconds."""
    validate_hash: str | None = None
    """Shards are checked by this algorithm; default: the fastest of those in index.json."""
    allow_unhashed_shards: bool = False
    """Load shards that have no hash beside others that have one; their damage is not seen."""
    keep_zip: bool = False
    token_encoding_type: str = "int64"
    """The type of a column `tokens` of plain bytes, such as uint16; arrays say theirs themselves."""
    eos_token_id: int | None = None
    """The token that ends a document, for attn_uses_sequence_id. Default: the tokenizer's end of text."""
    bos_token_id: int | None = None
    """The token that begins one instead."""
    override_eos_token_id_mismatch_error: bool = False
    """Permit an eos_token_id that is not the tokenizer's."""
    override_bos_token_id_mismatch_error: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class LoaderConfig:
    name: str = "text"
    """text, or python:package.module:function, which is called with device_batch_size, num_workers, drop_last and the
    block's other keys, and must return a DataLoader of {"input_ids": int64 [device_batch_size, tokens]}."""
    dataset: TextDatasetConfig = field(default_factory=TextDatasetConfig)
    drop_last: bool = True
    """Evaluation never drops a sample, whatever this says."""
    num_workers: int = 0
    """Processes per rank that read and decode."""
    pin_memory: bool = True
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    timeout: float = 0
    """Seconds to wait for a worker; 0 waits for ever."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """For python: loaders."""


# ------------------------------------------------------------------------------------------- training


NEWTON_SCHULZ_STEPS = 5
"""Of muon, unless `ns_steps` says otherwise."""

COMPOSERS_WEIGHT_DECAY = 1e-5
"""Default of its DecoupledAdamW."""

LOSS_CHUNK_MIB = 256


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerConfig:
    name: str
    """decoupled_adamw, adamw, lion, decoupled_lionw, muon, or python:package.module:Class."""
    lr: float
    """muon: of the blocks' matrices."""
    adamw_lr: float | None = None
    """muon: of embeddings, head, norms and biases, which AdamW updates. Default: lr."""
    betas: tuple[float, float] | None = None
    """Default (0.9, 0.95) for the AdamWs, (0.9, 0.99) for the Lions."""
    momentum: float | None = None
    """muon: of the matrices' gradients; default 0.95."""
    ns_steps: int | None = None
    """muon: iterations of Newton and Schulz; default 5."""
    ns_dtype: str | None = None
    """muon: in which they are computed, bf16 (default) or fp32."""
    adjust_lr_fn: str | None = None
    """muon, as in torch: match_rms_adamw (default) makes updates as large as AdamW's; original is Jordan's scale."""
    eps: float = 1e-8
    weight_decay: float | None = None
    """Decoupled optimizers: multiplied by lr/initial lr alone; the others: by lr. Default: 1e-5 for decoupled_adamw, as
    in Composer, 0 for the others."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """For python: optimizers."""

    @property
    def decay(self) -> float:
        if self.weight_decay is None:
            return COMPOSERS_WEIGHT_DECAY if self.name == "decoupled_adamw" else 0.0
        return self.weight_decay


@dataclass(kw_only=True, slots=True, frozen=True)
class SchedulerConfig:
    name: str
    """constant_with_warmup, cosine_with_warmup, linear_decay_with_warmup, inv_sqrt_with_warmup, warmup_stable_decay"""
    t_warmup: str | int = "0ba"
    """Linear warm-up from 0."""
    t_max: str | int = "1dur"
    alpha_i: float = 1.0
    """linear: the multiplier after warm-up."""
    alpha_f: float = 0.0
    """cosine, linear, warmup_stable_decay: the multiplier at t_max."""
    t_decay: str | int = "0.1dur"
    """warmup_stable_decay: the span of the decay, which ends at t_max. Until then the rate is lr."""
    decay: str | None = None
    """warmup_stable_decay: the decay's shape, linear (default), cosine or 1-sqrt."""
    t_scale: str | int = "1ba"
    """inv_sqrt: the time scale of the decay."""
    t_cooldown: str | int = "0ba"
    """inv_sqrt: linear decay over the last span before t_max."""
    alpha_f_decay: float = 0.0
    """inv_sqrt: the multiplier the decay tends to."""
    alpha_f_cooldown: float = 0.0
    """inv_sqrt: the multiplier the cool-down ends at."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GradientClippingConfig:
    clipping_type: str = "norm"
    """norm or value"""
    clipping_threshold: float = 1.0


@dataclass(kw_only=True, slots=True, frozen=True)
class AlgorithmsConfig:
    gradient_clipping: GradientClippingConfig | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class FSDPConfig:
    sharding_strategy: str = "FULL_SHARD"
    """FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD, ZERO_1 (the optimizer's state sharded, all else whole)"""
    mixed_precision: str = "DEFAULT"
    """PURE: parameters, residual stream and gradient reduction in the compute precision. DEFAULT: gradients are
    reduced in fp32. FULL: parameters and residual stream in fp32, matrix products in the compute precision."""
    data_parallel_shard_degree: int | None = None
    """HYBRID_SHARD: devices that share one copy of the model; default: the devices of a node."""
    reduce_every_microbatch: bool | None = None
    """Sum gradients over devices after each microbatch (memory for one block's whole gradient) or after the last one
    (memory for the whole model's). Default: after the last, up to 1.5 billion parameters."""
    activation_checkpointing: bool | str = False
    """true recomputes each block in the backward pass; selective recomputes all but matrix products and attention."""
    activation_checkpointing_reentrant: bool = False
    activation_cpu_offload: bool = False
    """Keep what is left of activations in the host's memory; with activation_checkpointing."""
    offload_optimizer: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory and update them there. For accelerators."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorParallelConfig:
    tensor_parallel_degree: int = 1
    """Neighbouring devices that divide the heads and the feed-forward width of each layer and the vocabulary among them
    and see the same samples; fsdp_config says how the model is shared by such groups."""
    sequence_parallel: bool = False
    """Between layers each device has its run of every sequence: less memory, the same exchange."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ContextParallelConfig:
    context_parallel_degree: int = 1
    """Devices that divide the tokens of each sample among them; fsdp_config says how the model is shared, by all of
    them."""
    kind: str = "heads"
    """heads: in attention, each device has some heads of all tokens. gather: each has all heads of its own tokens'
    queries, and all keys and values; for models with fewer heads than devices."""

    @property
    def num_pieces(self) -> int:
        """Equal pieces that a sample is cut into."""
        return self.context_parallel_degree * (2 if self.kind == "gather" else 1)

    def pieces_of(self, rank: int) -> list[int]:
        """Of a rank of the group. gather: one from the beginning and one from the end; a causal mask lets the two
        together see as many tokens as those of any other rank."""
        return [rank] if self.kind == "heads" else [rank, self.num_pieces - 1 - rank]


@dataclass(kw_only=True, slots=True, frozen=True)
class PipelineConfig:
    pipeline_parallel_degree: int = 1
    """Stages: devices, or groups of them, that each hold some of the blocks and see the same samples one after the
    other; fsdp_config and tp_config say how each stage is divided."""
    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zero_bubble, zbv: in which order a stage computes forward and backward passes. No
    schedule changes the gradient."""
    virtual_stages: int | None = None
    """Runs of blocks on each device. Default: 2 for interleaved and zbv, else 1."""
    blocks: list[int] | None = None
    """Blocks of each run, through the model. Default: divided evenly by parameters, embedding and head counted."""
    num_microbatches: int | None = None
    """Default: what device_train_microbatch_size makes; without that, about 4 for each stage."""

    @property
    def num_runs(self) -> int:
        """Runs of blocks on each device."""
        return self.virtual_stages or (2 if self.schedule in ("interleaved", "zbv") else 1)

    @property
    def splits_backward(self) -> bool:
        """The gradients of weights are computed apart from those of inputs."""
        return self.schedule in ("zero_bubble", "zbv")

    def default_num_microbatches(self, device_batch_size: int) -> int:
        """The fewest that give each stage 4 or more and divide the batch; else the most that do; else one a sample."""
        degree = self.pipeline_parallel_degree
        fitting = [n for n in range(degree, device_batch_size + 1, degree) if device_batch_size % n == 0]
        return next((n for n in fitting if n >= 4 * degree), fitting[-1] if fitting else device_batch_size)


@dataclass(kw_only=True, slots=True, frozen=True)
class SpeedMonitorConfig:
    window_size: int = 100
    """Batches over which throughput is averaged."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NoOptions:
    """A callback that takes none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ProfilerConfig:
    """torch's profiler, with the schedule of Composer's `cyclic_schedule`: batches, and their order in a cycle."""

    skip_first: int = 0
    """Batches before the first cycle."""
    wait: int = 0
    """Batches without the profiler."""
    warmup: int = 1
    """Batches with it, of which nothing is kept: the first ones are slowed down by it."""
    active: int = 4
    """Batches that are traced."""
    repeat: int = 1
    """Cycles; 0 for as many as the run has room for. Each leaves a trace of its own."""
    folder: str | None = None
    """Of the traces; default: <run_folder>/traces."""
    all_ranks: bool = False
    """A trace of each rank, not of rank 0 alone."""
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class CallbacksConfig:
    speed_monitor: SpeedMonitorConfig = field(default_factory=SpeedMonitorConfig)
    lr_monitor: NoOptions | None = None
    memory_monitor: NoOptions | None = None
    runtime_estimator: NoOptions | None = None
    """These three are always on; naming them is allowed."""
    profiler: ProfilerConfig | None = None
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    """python:package.module:Class -> keyword arguments."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WandbConfig:
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    """Default: the run name."""
    tags: list[str] = field(default_factory=list)
    init_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorboardConfig:
    log_dir: str | None = None
    """Default: <run directory>/tensorboard."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LoggersConfig:
    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class IslandsConfig:
    """This launch as one of several that train one run at once, each with a process group of its own."""

    coordinator: str
    """host:port of `llmfoundry-lite islands coordinate`."""
    begin_with: int | None = None
    """Start the coordinator, on this host, where none answers yet; the run begins when so many islands are here."""
    name: str
    """Of this island, unlike any other's."""
    address: str = "127.0.0.1"
    """Of this host, where its ranks listen for those of other islands."""
    weight: float = 1.0
    """Rows per second beside the other islands', until they have been measured."""
    check_weights_every: int = 100
    """Batches after which weights are compared; where they differ, those of the island that saves win."""


DEFAULT_EVAL_TOKENS = 8192
"""Of a device in one forward pass of an evaluation, which keeps no activations."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainConfig:
    """A training run. Precedence: these defaults < YAML files, in order < key=value arguments."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    train_loader: LoaderConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    max_duration: str | int
    """4800ba, 1ep, 2.5e9tok or 1000sp; a bare integer counts epochs."""
    global_train_batch_size: int
    """Samples, over all devices."""
    max_seq_len: int
    """Tokens."""

    run_name: str
    """Default: $RUN_NAME, else the first YAML file's name."""
    run_folder: str
    """Default: runs/<run_name>. Always local."""
    seed: int = 17
    precision: str = "amp_bf16"
    """fp32, tf32, amp_bf16, amp_fp16. tf32 is fp32 with products in TF32 where the device has it; nothing else uses
    TF32."""
    eval_loader: LoaderConfig | None = None
    """Validation data; a list of loaders, each with a label, is read as eval_loaders."""
    eval_loaders: dict[str, LoaderConfig] = field(default_factory=dict)
    """Label -> validation data, logged as eval/<label>/loss."""
    eval_interval: str | int = 1
    """A span; a bare integer counts epochs; 0 never evaluates."""
    eval_first: bool = False
    eval_subset_num_batches: int = -1
    """Global batches of device_eval_batch_size times the devices (groups of them with tp_config or cp_config); -1 for
    all."""
    loss_chunk_mib: int = LOSS_CHUNK_MIB
    """Of fp32 logits that the loss computes at a time; it takes two and a half times as much. More make larger
    products, and add up the embedding's gradient in fewer parts."""
    device_eval_batch_size: int | None = None
    """Samples in one forward pass. Default: device_train_microbatch_size where that is a number, else as many as
    8,192 tokens hold; 1 with eval_subset_num_batches, which counts such batches. The loss does not depend on it."""
    icl_tasks: list[Any] | str = field(default_factory=list)
    """Tasks to evaluate in context whenever the validation loss is due, as scripts/eval.py names them."""
    icl_task_folder: str = "evals"
    icl_limit: int | None = None
    """Only the first so many items of each task."""
    device_train_microbatch_size: int | str | None = None
    """Samples, or auto: the most that fits, measured before the first batch. Default: the device's whole batch."""
    accumulate_train_batch_on_tokens: bool = True
    algorithms: AlgorithmsConfig = field(default_factory=AlgorithmsConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    loggers: LoggersConfig = field(default_factory=LoggersConfig)
    fsdp_config: FSDPConfig | None = None
    """null: every device holds the whole model (NO_SHARD) up to 1.5 billion parameters, and a share (FULL_SHARD) of
    larger ones."""
    tp_config: TensorParallelConfig | None = None
    """null: no layer is divided."""
    cp_config: ContextParallelConfig | None = None
    """null: every device has whole samples."""
    pp_config: PipelineConfig | None = None
    """null: every device computes all blocks."""
    islands: IslandsConfig | None = None
    """null: this launch trains alone."""
    on_non_finite: str = "stop"
    """stop, or skip: what to do with a batch whose loss or gradient is not finite."""
    max_skipped_batches: int = 100
    """skip gives up after this many batches of one launch."""
    save_folder: str | None = None
    """Where checkpoints go: a local folder or an fsspec URL such as s3://…; default: <run_folder>/checkpoints."""
    save_interval: str | int = "1000ba"
    """A span, a time such as 5m, 90s or 1h, or auto: as often as costs 2 % of training time, by what saves are measured
    to cost, and more often in a run that has failed often. The end of a launch always saves."""
    save_num_checkpoints_to_keep: int = -1
    """The newest so many; -1 keeps all."""
    save_keep_every_batches: int | None = None
    """Also keep every one whose batch is a multiple of this."""
    autoresume: bool = False
    """Carry on from the newest intact checkpoint of save_folder, if there is one."""
    load_path: str | None = None
    """A checkpoint, a folder of them, or a run directory to begin from; what autoresume finds goes before it."""
    load_weights_only: bool = False
    """Take the weights from load_path and begin at batch 1."""
    load_ignore_keys: list[str] = field(default_factory=list)
    """Patterns of tensors of load_path to leave as they were initialised, such as model/transformer.wpe.*"""
    load_cast: bool = False
    """Permit tensors of load_path in another dtype."""
    stop_after: str | int | None = None
    """End this launch (not the run) after this span, saved."""
    max_wall_time: str | int | float | None = None
    """Leave, saved, with exit code 75 when this launch is so old: 3h55m, 90s, 1d, 3:55:00, or seconds."""
    preemption_grace_seconds: float = 20.0
    """From SIGTERM, SIGUSR1, max_wall_time or the file STOP to the exit, saved or not. `composer` kills after 30."""
    retry_for: str | int | float = "30m"
    """How long a fault that may pass is waited for without progress, such as a full disk, a server's 5xx or an expired
    token: by the last save of a launch, and by `llmfoundry-lite train -n`, which starts ranks again. 0 never waits."""
    compile_config: dict[str, Any] | None = None
    """Arguments of torch.compile, which is applied to each block; {} for its defaults."""
    deterministic: bool = False
    """Only kernels that give the same digits every time; slower, and an error where torch has none."""
    dist_timeout: float = 600.0
    """Seconds a collective may take."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of NCCL, RCCL and torch for this hardware; what the shell has set already stands."""
    progress_bar: bool = False
    log_to_console: bool = True
    console_log_interval: str | int = "1ba"
    export_at_end: bool = True
    """Write <run directory>/huggingface when the run is done and plain transformers can read the model."""
    python_log_level: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def sharding(self) -> FSDPConfig:
        is_small = self.model.num_matrix_parameters <= LARGEST_REPLICATED
        return self.fsdp_config or FSDPConfig(sharding_strategy="NO_SHARD" if is_small else "FULL_SHARD")

    @property
    def tensor_parallel_degree(self) -> int:
        return self.tp_config.tensor_parallel_degree if self.tp_config else 1

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor_parallel_degree > 1 and self.tp_config is not None and self.tp_config.sequence_parallel

    @property
    def context(self) -> ContextParallelConfig:
        return self.cp_config or ContextParallelConfig()

    @property
    def pipeline(self) -> PipelineConfig:
        return self.pp_config or PipelineConfig()

    @property
    def reduces_every_microbatch(self) -> bool:
        if self.pipeline.pipeline_parallel_degree > 1:
            return False  # a stage sums its gradients over devices when the schedule is done
        wish = self.sharding.reduce_every_microbatch
        return self.model.num_matrix_parameters > LARGEST_REPLICATED if wish is None else wish

    def first_microbatch_size(self, device_batch_size: int) -> int:
        """Samples, as a launch begins: auto measures from 1 on."""
        if self.device_train_microbatch_size == "auto":
            return 1
        if self.pipeline.pipeline_parallel_degree > 1 and self.device_train_microbatch_size is None:
            wish = self.pipeline.num_microbatches or self.pipeline.default_num_microbatches(device_batch_size)
            return -(-device_batch_size // wish)
        return min(int(self.device_train_microbatch_size or device_batch_size), device_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Samples of one device in one forward pass of an evaluation."""
        if self.device_eval_batch_size is not None:
            return self.device_eval_batch_size
        if self.eval_subset_num_batches > 0:
            return 1  # which samples are evaluated must not follow from a setting of the hardware's
        if isinstance(self.device_train_microbatch_size, int):
            return self.device_train_microbatch_size
        return max(1, DEFAULT_EVAL_TOKENS // self.max_seq_len)

    @property
    def has_own_components(self) -> bool:
        """Whether the YAML names code of the user's, by its import path."""
        names = [self.optimizer.name, *(loader.name for loader in self.loaders.values())]
        return bool(self.callbacks.extra) or any(name.startswith("python:") for name in names)

    @property
    def validation(self) -> dict[str, LoaderConfig]:
        """The key of each block of validation data -> the block."""
        single = {} if self.eval_loader is None else {"eval_loader": self.eval_loader}
        return single | {f"eval_loaders.{label}": loader for label, loader in self.eval_loaders.items()}

    @property
    def loaders(self) -> dict[str, LoaderConfig]:
        """The key of each block of data -> the block."""
        return {"train_loader": self.train_loader, **self.validation}

    @property
    def checkpoint_folder(self) -> str:
        return self.save_folder or f"{self.run_folder}/checkpoints"


def data_label(key: str) -> str:
    """Name the data of a loader's block as Composer does: train, eval, or eval/wiki for `eval_loaders.wiki`."""
    block, _, label = key.partition(".")
    return f"eval/{label}" if label else block.removesuffix("_loader")


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as YAML and JSON have it: dictionaries, lists, numbers and text."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    values = plain(asdict(config))
    values["optimizer"]["weight_decay"] = config.optimizer.decay  # a default may change; what a run did may not
    return values


# ----------------------------------------------------------------------------------------- evaluation


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskConfig:
    """One task, in LLM Foundry's words; its task lists load unchanged."""

    label: str
    icl_task_type: str
    """multiple_choice, schema, language_modeling, generation_task_with_answers or perplexity."""
    dataset_uri: str
    """A JSONL file (for perplexity also a text file or an MDS split), or hf://NAME with hf_loading_vars."""
    num_fewshot: list[int] = field(default_factory=lambda: [0])
    """One result for each."""
    fewshot_random_seed: int = 1234
    fewshot_fixed: bool = False
    """The same examples for every item, instead of a choice that depends on (seed, item) alone. They come from the
    first items of the file, which are then not evaluated."""
    prompt_string: str = ""
    """Once, before everything."""
    example_delimiter: str = "\n"
    """Before each example but the first, and before the item."""
    continuation_delimiter: str = " "
    """Between a context and its answer."""
    prelimiter: str = ""
    """Before each context."""
    strip_dataset: bool = True
    """Strip white space around the columns' texts."""
    tokenization: str | None = None
    """separate: context and answer each on their own, as LLM Foundry does; joint: together, then divided, as
    lm-evaluation-harness does. Default: the evaluation's."""
    metric: str | None = None
    """Which of acc_per_token, acc (summed) and acc_norm (per character) is the task's in tables and averages; default:
    acc_per_token where there are choices, as in LLM Foundry. All three are in the results."""
    has_categories: bool = False
    """Each value of the column `category` is a task of its own, as in LLM Foundry: an item's examples come from its
    category, and the score is the mean of the categories' scores, which are given too."""
    cluster: str | None = None
    """The column that items share which belong together, such as `passage`: standard errors, intervals and tests count
    clusters as independent, and the items of one as not."""
    max_new_tokens: int | None = None
    """Generation; default: as many as the longest answer has."""
    early_stopping_criteria: list[str] = field(default_factory=list)
    """Generation: texts that end an answer."""
    do_normalization: bool = True
    """Generation: compare in lower case, without punctuation, articles and extra spaces."""
    cot_delimiter: str = ""
    """Generation: the answer is what follows the last of these."""
    hf_loading_vars: dict[str, Any] = field(default_factory=dict)
    """Arguments of datasets.load_dataset."""
    hf_parsing_map: dict[str, list[str]] = field(default_factory=dict)
    """Our column -> theirs, joined by spaces."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Benchmark:
    """A task of a gauntlet's category."""

    name: str
    """The task's label."""
    num_fewshot: int
    random_baseline: float
    """The accuracy that chance gives, below 1."""

    @property
    def task(self) -> str:
        """As results name it: `arc_easy/3-shot`."""
        return f"{self.name}/{self.num_fewshot}-shot"


@dataclass(kw_only=True, slots=True, frozen=True)
class Category:
    name: str
    benchmarks: list[Benchmark]


@dataclass(kw_only=True, slots=True, frozen=True)
class GauntletConfig:
    """How scores of tasks become scores of categories and averages, in LLM Foundry's words."""

    categories: list[Category]
    weighting: str = "EQUAL"
    """Of the tasks of a category: EQUAL, SAMPLE_SZ (by the number of items) or LOG_SAMPLE_SZ (by its log2)."""
    subtract_random_baseline: bool = True
    rescale_accuracy: bool = True
    """Divide by what is left above chance, so that the best score is 1."""
    averages: dict[str, list[str]] | None = None
    """Name -> categories; default: `default_average`, of all."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalConfig:
    """An evaluation. Precedence: these defaults < YAML files, in order < key=value arguments."""

    models: dict[str, str]
    """A name of your choice -> a run directory, a checkpoint (…/ba200, local or URL), the folder of a Hugging Face
    model, or hf:NAME."""
    icl_tasks: list[Any] | str
    """Names of files in task_folder (without .yaml), files, or tasks written out here;
    `{label: arc_easy, num_fewshot: [5]}` is the one of that name with other examples."""
    suite: str
    """Default: the first YAML file's name."""
    eval_gauntlet: GauntletConfig | None = None
    """LLM Foundry's Eval Gauntlet, or the name of a file of it: a second table, of categories and averages."""
    skip_missing_tasks: bool = False
    """Leave out, by name, tasks whose data file is not here, instead of refusing the evaluation."""
    results_folder: str = "results"
    """Holds <suite>/<model>.json and <model>.items.jsonl."""
    task_folder: str = "evals"
    tokenization: str = "separate"
    precision: str = "fp32"
    """Of weights and hidden states: fp32, tf32 (fp32 with products in TF32, where the device has it), bf16 or fp16;
    log-probabilities are always fp32, and with tf32 their products in TF32."""
    device_batch_tokens: int | None = None
    """Tokens in one forward pass; default: 2,048 on a CPU, 32,768 on an accelerator."""
    max_seq_len: int | None = None
    """Default: the model's."""
    limit: int | None = None
    """Only the first so many items of each task: a try, not a result."""
    against: str | None = None
    """A stored result, MODEL.json: items are asked in a random order, until the difference to it is decided."""
    spending: str = "obrien_fleming"
    """Of against: when the error is spent, late, or evenly with pocock."""
    margin: float | None = None
    """Of against: a task also ends when no difference is as large as this, in accuracy or bits per byte."""
    tokenizer: str | None = None
    """Default: the model's own."""
    fsdp: bool = False
    """Shard each model over all ranks instead of keeping it whole on each."""
    all_checkpoints: bool = False
    """Evaluate every checkpoint of each run, as NAME-ba200: a learning curve."""
    redo: bool = False
    """Evaluate again, and replace, what results_folder has already: of the same model the tasks asked for, of another
    everything."""
    environment: dict[str, str] = field(default_factory=dict)
    dist_timeout: float = 600.0
    variables: dict[str, Any] = field(default_factory=dict)
