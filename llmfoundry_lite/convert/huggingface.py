"""Export to, and import from, the Hugging Face layouts that `transformers` runs without remote code.

Models with ALiBi are written as MPT, with RoPE as Llama, the others as GPT-2 (`layouts.py`). Folders of MPT are read
here, and a companion reads the others. Files are safetensors; a pickle is refused unless the caller brings a reader for
it. `transformers` is imported only to prove an exported tokenizer: the layouts are written down here, and tests compare
them with it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from llmfoundry_lite import companions
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.check import check_model
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.files import (
    published,
    read_json,
    read_weights,
    write_for_plain_class,
    write_json,
    write_tokenizer,
    write_weights,
)
from llmfoundry_lite.convert.layout import (
    HFConfig,
    Layout,
    Readable,
    Source,
    check_keys,
    find_inexpressible,
    layout_tensor,
    read_config,
    write_config,
)
from llmfoundry_lite.convert.layouts import LLAMA, QWEN2, layout_of
from llmfoundry_lite.convert.layouts import MPT as MPT_LAYOUT
from llmfoundry_lite.convert.tokenizer_proof import find_difference
from llmfoundry_lite.data.tokenizer import Tokenizer, has_vocabulary, load_tokenizer
from llmfoundry_lite.errors import ExportError, either
from llmfoundry_lite.models.flops import find_size_mismatch
from llmfoundry_lite.models.parameters import parameter_shapes

KINDS = ("mpt", "gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Values of config.json's model_type whose folders become our model. A companion reads all but the first."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that can be read. Others are packed, and need their own code to be unpacked."""
MAX_SHARD_BYTES = 5_000_000_000


def export_model(
    state_dict: Mapping[str, torch.Tensor],
    config: ModelConfig,
    folder: str | Path,
    *,
    tokenizer_folder: str | Path | None = None,
    dtype: str = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str | None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, with the logits of our model.

    `state_dict` holds whole CPU tensors under the names of `MPT.state_dict()`; `dtype` is fp32 or bf16. An earlier
    export in `folder` is replaced in one step once the new one is complete. Settings that only matter to training are
    kept where the layout has a key for them: dropout, `embedding_fraction`, `attn_uses_sequence_id`, initialisation,
    whether q, k and v are one matrix. transformers' ids of sample texts are compared with the tokenizer's own.

    Returns a note on what a user may not expect, or None. Raises ExportError.
    """
    reason = can_export(config)
    if reason is not None:
        raise ExportError(f"{folder}: {reason}")
    if dtype not in DTYPES:
        raise ExportError(f"{folder}: dtype {dtype!r} given, expected {' or '.join(DTYPES)}")
    check_tensors(state_dict, parameter_shapes(config), str(folder))
    torch_dtype = DTYPES[dtype]

    with published(Path(folder)) as draft:
        special_tokens, tokenizer = {}, None
        if tokenizer_folder is not None:
            special_tokens = write_tokenizer(Path(tokenizer_folder), draft, config.max_seq_len)
            if has_vocabulary(Path(tokenizer_folder)):
                tokenizer = load_tokenizer(tokenizer_folder)
        other_keys = {**special_tokens, "dtype": str(torch_dtype).removeprefix("torch.")}
        layout, note = write_proven_config(draft, config, other_keys, tokenizer)

        sources = layout_sources(config, layout)
        shapes = layout_shapes(config, sources)
        sizes_bytes = {name: shape.numel() * torch_dtype.itemsize for name, shape in shapes.items()}

        def build_tensor(name: str) -> torch.Tensor:
            return layout_tensor(state_dict, config, sources[name]).to(torch_dtype).contiguous()

        write_weights(sizes_bytes, build_tensor, draft, max_shard_bytes)
    return note


def write_proven_config(
    draft: Path, config: ModelConfig, other_keys: HFConfig, tokenizer: Tokenizer | None
) -> tuple[Layout, str | None]:
    """Write config.json, so that transformers reads the draft's tokenizer as `tokenizer` reads texts.

    `other_keys` are config.json's further ones. Returns the layout, and a note where it is another than the usual one.
    Raises ExportError where transformers finds other ids whatever config.json says.
    """
    layout = layout_of(config)
    write_json(draft / "config.json", {**write_config(config, layout), **other_keys})
    if tokenizer is None:
        return layout, None

    difference = find_difference(draft, tokenizer)
    if difference is not None:
        write_for_plain_class(draft, tokenizer)
        difference = find_difference(draft, tokenizer)
    if difference is None:
        return layout, None

    if layout is QWEN2:
        # transformers 5 reads every tokenizer of this type with one class, which has a pre-tokenizer of its own.
        note = f"written as llama, with zeros for biases that qwen2 does not have; as qwen2, {difference}"
        write_json(draft / "config.json", {**write_config(config, LLAMA), **other_keys})
        difference = find_difference(draft, tokenizer)
        if difference is None:
            return LLAMA, note
    raise ExportError(
        f"tokenizer {tokenizer.name} would be read otherwise by transformers than by the run: {difference}; export the "
        "weights without it (--tokenizer none)"
    )


def import_model(
    folder: str | Path, read_pickle: Callable[[Path], dict[str, torch.Tensor]] | None = None
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read a Hugging Face folder of one of KINDS: the model it describes, and its weights as stored.

    MPT folders by LLM Foundry are read too, with the options that transformers' MPT lacks. `read_pickle` reads
    pytorch_model.bin files where there are no safetensors; without it they are refused. Raises ExportError, and
    ConfigError where a companion is missing.
    """
    folder = Path(folder)
    hf_config = read_hf_config(folder)
    check_keys(hf_config, layout_named(hf_config, str(folder)), str(folder))  # refuse before gigabytes are read
    return from_hugging_face(read_weights(folder, read_pickle), hf_config, str(folder))


def read_hf_config(folder: Path) -> HFConfig:
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder}: no config.json; expected the folder of a Hugging Face model")
    return read_json(folder / "config.json")


def can_export(config: ModelConfig) -> str | None:
    """Describe why plain `transformers` cannot run this model, and the remedy; None when it can."""
    return find_inexpressible(config, layout_of(config))


def layout_named(hf_config: HFConfig, where: str) -> Readable:
    """Return the layout that config.json names. Raises ExportError, and ConfigError where it is a companion's."""
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ExportError(f"{where}: model_type {kind!r} cannot be read; expected {either(KINDS)}")
    if kind == "mpt":
        return MPT_LAYOUT
    needed_for = f"{where}: folders of GPT-2, Llama, Mistral and Qwen"
    find_layout = companions.load("llmfoundry_formats.layouts:find_layout", needed_for)
    return find_layout(kind)


def build_hf_config(config: ModelConfig) -> HFConfig:
    """Describe the model as config.json does, without dtype and special tokens."""
    return write_config(config, layout_of(config))


def layout_sources(config: ModelConfig, layout: Layout | None = None) -> dict[str, Source]:
    """Map every tensor of a layout to its source. The default layout is the one that fits the model."""
    layout = layout or layout_of(config)
    head = {} if config.tie_word_embeddings else {"lm_head.weight": Source(("lm_head.weight",))}
    return layout.sources(config) | head


def from_hugging_face(
    hf_state: Mapping[str, torch.Tensor], hf_config: HFConfig, where: str = "the model"
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Convert a layout's config and tensors to ours. Raises ExportError, which names the key or tensor at fault."""
    layout = layout_named(hf_config, where)
    check_keys(hf_config, layout, where)
    state = {k: v for k, v in hf_state.items() if not k.endswith(layout.buffers)}
    state = {k if k.startswith((layout.prefix, "lm_head.")) else layout.prefix + k: v for k, v in state.items()}

    try:
        config = read_config(hf_config, state, layout, where)
        build_block(ModelConfig, asdict(config), "model")  # a file may not set what a YAML may not
        check_model(config)
        # Refuse before anything of that size is built.
        if problem := find_size_mismatch(config, {name: tensor.shape for name, tensor in state.items()}):
            raise ExportError(f"{where}: config.json describes another model than its tensors: {problem}")
        parameter_shapes(config)
    except ExportError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RuntimeError) as error:
        reason = layout.in_their_words(str(error).split("\n")[0].removeprefix("configuration: "))
        raise ExportError(f"{where}: config.json describes a model that cannot be: {reason}") from error
    # LLM Foundry's folders have every tensor of ours, under our names.
    is_mpt = layout is MPT_LAYOUT
    sources = {name: Source((name,)) for name in parameter_shapes(config)} if is_mpt else layout_sources(config, layout)
    embedding = next(name for name, source in sources.items() if source.names == ("transformer.wte.weight",))
    state = without_tied_head(state, embedding, config, where)
    check_tensors(state, layout_shapes(config, sources), where)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in parameter_shapes(config)}
    for name, source in sources.items():
        if source.names[0] in parts:
            parts[source.names[0]].append(state[name].t().contiguous() if source.is_transposed else state[name])
    return config, {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items()}


def without_tied_head(
    state: Mapping[str, torch.Tensor], embedding: str, config: ModelConfig, where: str
) -> dict[str, torch.Tensor]:
    """Remove the output embedding where it is tied to the input's: old files hold both. Raises ExportError."""
    state = dict(state)
    if config.tie_word_embeddings and "lm_head.weight" in state:
        head = state.pop("lm_head.weight")
        if embedding in state and not torch.equal(head, state[embedding]):
            raise ExportError(
                f"{where}: lm_head.weight differs from the input embedding, and tie_word_embeddings says that they "
                "are one matrix"
            )
    return state


# ------------------------------------------------------------------------------------------------------- shapes


def layout_shapes(config: ModelConfig, sources: Mapping[str, Source]) -> dict[str, torch.Size]:
    ours = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(config).items()}
    return {name: layout_tensor(ours, config, source).shape for name, source in sources.items()}


def check_tensors(state_dict: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], where: str) -> None:
    """Raise ExportError, which names tensors that are missing, unexpected, of a wrong shape or of a packed dtype."""
    if missing := [name for name in expected if name not in state_dict]:
        raise _refused(where, missing, "is missing; the model's configuration asks for it")
    if misshapen := [name for name, shape in expected.items() if state_dict[name].shape != shape]:
        here, wanted = state_dict[misshapen[0]].shape, expected[misshapen[0]]
        raise _refused(where, misshapen, f"has shape {list(here)}, the model's configuration says {list(wanted)}")
    if packed := [name for name in expected if state_dict[name].dtype not in WEIGHT_DTYPES]:
        kind = str(state_dict[packed[0]].dtype).removeprefix("torch.")
        raise _refused(where, packed, f"is {kind}; expected fp32, bf16 or fp16")
    if unknown := [name for name in state_dict if name not in expected]:
        raise _refused(where, unknown, "has no place in the model's configuration")


def _refused(where: str, names: Sequence[str], problem: str, limit: int = 8) -> ExportError:
    """Return the error about the first of `names`, which also lists the other tensors with the same problem."""
    first, *others = names
    rest = f" and {len(others) - limit} more" if len(others) > limit else ""
    likewise = f"; likewise {', '.join(others[:limit])}{rest}" if others else ""
    return ExportError(f"{where}: tensor {first} {problem}{likewise}")
