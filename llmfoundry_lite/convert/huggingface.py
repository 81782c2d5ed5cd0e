"""Exports models to, and imports them from, the Hugging Face formats that `transformers` runs without remote code.

Models with ALiBi are written as MPT, with RoPE as Llama or a format like it, and all others as GPT-2
(`hf_formats.py`). Folders of MPT are read here, and a companion reads the others. Weights are safetensors; a pickle is
refused unless the caller brings a reader for it. `transformers` is imported only to check an exported tokenizer. The
formats are described here, and tests compare them with `transformers`.
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
from llmfoundry_lite.convert.hf_format import (
    HFConfig,
    HFFormat,
    ReadableHFFormat,
    TensorSource,
    build_config_json,
    build_hf_tensor,
    check_keys,
    describe_inexpressible_option,
    read_model_config,
)
from llmfoundry_lite.convert.hf_formats import LLAMA, QWEN2, choose_format
from llmfoundry_lite.convert.hf_formats import MPT as MPT_FORMAT
from llmfoundry_lite.convert.multipliers import fold_multipliers, without_multipliers
from llmfoundry_lite.convert.tokenizer_proof import find_difference
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.data.tokenizer_files import has_vocabulary
from llmfoundry_lite.errors import ExportError, join_with_or
from llmfoundry_lite.models.flops import find_size_mismatch
from llmfoundry_lite.models.parameters import parameter_shapes

MODEL_TYPES = ("mpt", "gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Values of config.json's model_type whose folders can be imported. A companion reads all but the first."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that can be read. Others are packed (quantised), and need special code to be unpacked."""
MAX_SHARD_BYTES = 5_000_000_000
"""Largest size of an exported file of weights, unless a single tensor is larger."""
MAX_LISTED_TENSORS = 8
"""Largest number of tensors with the same problem that an error names after the first."""


def export_model(
    state_dict: Mapping[str, torch.Tensor],
    config: ModelConfig,
    folder: str | Path,
    *,
    tokenizer_folder: str | Path | None = None,
    dtype: str = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str | None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads as a model with the same logits as ours.

    state_dict: whole CPU tensors under the names of `MPT.state_dict()`.
    folder: the folder to write. An earlier export in it is replaced in one step when the new one is complete.
    tokenizer_folder: the tokenizer to write with the model; None for none. transformers must tokenise sample texts with
        it as this library does.
    dtype: fp32 or bf16.

    Settings that only matter to training are kept if the format has a key for them: dropout, `embedding_fraction`,
    `attn_uses_sequence_id`, initialisation, and whether q, k and v are one matrix. The multipliers of muP are folded
    into the weights.

    Returns a note on what a user may not expect, or None. Raises ExportError.
    """
    # Check everything before a file is written.
    problem = describe_export_problem(config)
    if problem is not None:
        raise ExportError(f"{folder}: {problem}")
    if dtype not in DTYPES:
        raise ExportError(f"{folder}: dtype {dtype!r} given, expected {' or '.join(DTYPES)}")
    check_tensors(state_dict, parameter_shapes(config), str(folder))
    torch_dtype = DTYPES[dtype]

    # No format has the multipliers of muP.
    state_dict = fold_multipliers(state_dict, config)
    config = without_multipliers(config)

    with published(Path(folder)) as draft:
        # Write the tokenizer.
        special_token_ids: HFConfig = {}
        tokenizer = None
        if tokenizer_folder is not None:
            special_token_ids = write_tokenizer(Path(tokenizer_folder), draft, config.max_seq_len)
            if has_vocabulary(Path(tokenizer_folder)):
                tokenizer = load_tokenizer(tokenizer_folder)

        # Write config.json. The tokenizer may decide which format is written.
        other_keys = {**special_token_ids, "dtype": str(torch_dtype).removeprefix("torch.")}
        hf_format, note = write_proven_config(draft, config, other_keys, tokenizer)

        # Write the weights. Their sizes are known before any tensor is built, so that the tensors can be divided into
        # files.
        sources = tensor_sources_of(config, hf_format)
        shapes = hf_tensor_shapes(config, sources)
        sizes_bytes = {name: shape.numel() * torch_dtype.itemsize for name, shape in shapes.items()}

        def build_tensor(name: str) -> torch.Tensor:
            """Return a tensor of the format by its name, in the dtype of the export."""
            return build_hf_tensor(state_dict, config, sources[name]).to(torch_dtype).contiguous()

        write_weights(sizes_bytes, build_tensor, draft, max_shard_bytes)
    return note


def write_proven_config(
    draft: Path, config: ModelConfig, other_keys: HFConfig, tokenizer: Tokenizer | None
) -> tuple[HFFormat, str | None]:
    """Write config.json so that transformers tokenises texts as `tokenizer` does, whose files are in `draft`.

    draft: the folder of the export.
    other_keys: keys of config.json that do not come from `config`, such as special tokens.
    tokenizer: the tokenizer to compare with; None to compare nothing.

    transformers chooses the tokenizer's class by config.json, and some classes change what a tokenizer does. So up to
    three forms are written, until one gives the same ids for sample texts.

    Returns the format, and a note if it is not the usual one. Raises ExportError if no form is right.
    """
    # Try the usual form.
    hf_format = choose_format(config)
    write_json(draft / "config.json", {**build_config_json(config, hf_format), **other_keys})
    if tokenizer is None:
        return hf_format, None

    # If that is wrong, name a class of tokenizers that changes nothing.
    difference = find_difference(draft, tokenizer)
    if difference is not None:
        write_for_plain_class(draft, tokenizer)
        difference = find_difference(draft, tokenizer)
    if difference is None:
        return hf_format, None

    if hf_format is QWEN2:
        # transformers 5 reads every tokenizer of a Qwen2 model with one class, which has a pre-tokenizer of its own. So
        # write the model as Llama, which can express it with zeros for a bias.
        note = f"written as llama, with zeros for biases that qwen2 does not have; as qwen2, {difference}"
        write_json(draft / "config.json", {**build_config_json(config, LLAMA), **other_keys})
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
    """Read the model configuration and the weights of a Hugging Face folder of one of MODEL_TYPES.

    `read_pickle` reads pytorch_model.bin files if there are no safetensors; None refuses them. MPT folders by LLM
    Foundry are read too, with the options that transformers' MPT lacks.

    Returns the configuration, and the tensors under our names, in the dtypes in which they are stored. Raises
    ExportError, and ConfigError if a companion is missing.
    """
    folder = Path(folder)
    location = str(folder)

    # The keys are checked here already, before gigabytes of weights are read.
    hf_config = read_hf_config(folder)
    check_keys(hf_config, find_readable_format(hf_config, location), location)

    hf_state = read_weights(folder, read_pickle)
    return convert_from_hugging_face(hf_state, hf_config, location)


def read_hf_config(folder: Path) -> HFConfig:
    """Read a folder's config.json. Raises ExportError if there is none, or it is not a JSON object."""
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder}: no config.json; expected the folder of a Hugging Face model")
    return read_json(folder / "config.json")


def describe_export_problem(config: ModelConfig) -> str | None:
    """Return why a model cannot be exported, and what to do about it, as the text of an error; None if it can be."""
    if config.own_parts:
        parts = ", ".join(f"model.{key} {name}" for key, name in config.own_parts.items())
        return (
            f"{parts}: no format of transformers has parts that are not of this package, so the model cannot be "
            "exported; keep the training checkpoint, which holds everything"
        )
    return describe_inexpressible_option(without_multipliers(config), choose_format(config))


def find_readable_format(hf_config: HFConfig, location: str) -> ReadableHFFormat:
    """Return the format that config.json names in `model_type`, which must be one of MODEL_TYPES.

    `location` is the folder, for errors. Raises ExportError for an unknown type, and ConfigError if the companion that
    reads it is not installed.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ExportError(f"{location}: model_type {model_type!r} cannot be read; expected {join_with_or(MODEL_TYPES)}")
    if model_type == "mpt":
        return MPT_FORMAT
    needed_for = f"{location}: folders of GPT-2, Llama, Mistral and Qwen"
    find_format = companions.load("llmfoundry_formats.hf_formats:find_format", needed_for)
    return find_format(model_type)


def build_hf_config(config: ModelConfig) -> HFConfig:
    """Return the content of config.json with which a model is exported, without dtype and special tokens."""
    return build_config_json(config, choose_format(config))


def tensor_sources_of(config: ModelConfig, hf_format: HFFormat | None = None) -> dict[str, TensorSource]:
    """Return the source in our model of every tensor of a format, by its name, the output embedding included.

    Without `hf_format`, it is the format in which the model is exported. An output embedding that is tied to the input
    embedding is not a separate tensor, and is left out.
    """
    hf_format = hf_format or choose_format(config)
    sources = hf_format.tensor_sources(config)
    if not config.tie_word_embeddings:
        sources = {**sources, "lm_head.weight": TensorSource(("lm_head.weight",))}
    return sources


def convert_from_hugging_face(
    hf_state: Mapping[str, torch.Tensor], hf_config: HFConfig, location: str = "the model"
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Convert a folder's config.json and tensors into our configuration, and tensors under our names.

    hf_state: the tensors of the folder, by their names in its files.
    hf_config: the content of config.json.
    location: the folder, for errors.

    Raises ExportError, which names the key or the tensor that cannot be converted.
    """
    # Read the configuration.
    hf_format = find_readable_format(hf_config, location)
    check_keys(hf_config, hf_format, location)
    state = normalise_names(hf_state, hf_format)
    config = read_checked_config(hf_config, state, hf_format, location)
    our_shapes = parameter_shapes(config)

    # Check that all tensors which the format has of such a model are there, with the right shape.
    if hf_format is MPT_FORMAT:
        # LLM Foundry's folders have every tensor of our model, under the same names.
        sources = {name: TensorSource((name,)) for name in our_shapes}
    else:
        sources = tensor_sources_of(config, hf_format)
    embedding_names = [name for name, source in sources.items() if source.names == ("transformer.wte.weight",)]
    state = without_tied_head(state, embedding_names[0], config, location)
    check_tensors(state, hf_tensor_shapes(config, sources), location)

    # Collect the parts of each of our tensors. A fused tensor is the concatenation of theirs, in the order of
    # `sources`. Zeros that an export added, for tensors that the model does not have, are left out.
    parts_of_tensor: dict[str, list[torch.Tensor]] = {name: [] for name in our_shapes}
    for hf_name, source in sources.items():
        our_name = source.names[0]
        if our_name in parts_of_tensor:
            tensor = state[hf_name]
            parts_of_tensor[our_name].append(tensor.t().contiguous() if source.is_transposed else tensor)

    tensors: dict[str, torch.Tensor] = {}
    for name, parts in parts_of_tensor.items():
        tensors[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return config, tensors


def normalise_names(hf_state: Mapping[str, torch.Tensor], hf_format: ReadableHFFormat) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder under the names that its format has for them, without buffers of old files.

    Files of the bare model, without an output embedding, have names without the format's prefix: for GPT-2,
    "h.0.ln_1.weight" becomes "transformer.h.0.ln_1.weight".
    """
    state: dict[str, torch.Tensor] = {}
    for name, tensor in hf_state.items():
        if name.endswith(hf_format.buffer_suffixes):
            continue
        # The output embedding never has the prefix.
        has_full_name = name.startswith((hf_format.tensor_prefix, "lm_head."))
        state[name if has_full_name else hf_format.tensor_prefix + name] = tensor
    return state


def read_checked_config(
    hf_config: HFConfig, state: Mapping[str, torch.Tensor], hf_format: ReadableHFFormat, location: str
) -> ModelConfig:
    """Read the model that config.json describes, and check it in the same way as one that a YAML file describes.

    state: the folder's tensors. A model that is much larger than them is refused before anything of its size is built.
    location: the folder, for errors.

    Raises ExportError, which uses the keys of config.json.
    """
    try:
        config = read_model_config(hf_config, state, hf_format, location)
        build_block(ModelConfig, asdict(config), "model")  # checks types and ranges
        check_model(config)  # checks options against each other
        if config.own_parts:
            key, name = next(iter(config.own_parts.items()))
            raise ExportError(
                f"{location}: config.json names code, {name}, for model.{key}, and code of a folder is never run"
            )
        problem = find_size_mismatch(config, {name: tensor.shape for name, tensor in state.items()})
        if problem:
            raise ExportError(f"{location}: config.json describes another model than its tensors: {problem}")
        parameter_shapes(config)  # builds the model without memory
    except ExportError:
        raise
    # config.json may have any content, and an impossible model can fail in any of these ways.
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RuntimeError) as error:
        first_line = str(error).split("\n")[0].removeprefix("configuration: ")
        reason = hf_format.with_their_keys(first_line)
        raise ExportError(f"{location}: config.json describes a model that cannot be: {reason}") from error
    return config


def without_tied_head(
    state: Mapping[str, torch.Tensor], embedding: str, config: ModelConfig, location: str
) -> dict[str, torch.Tensor]:
    """Return a folder's tensors without the output embedding, if the model ties it to the input embedding.

    Old files have both. `embedding` is the name of the input embedding. Raises ExportError if the two differ.
    """
    state = dict(state)
    if config.tie_word_embeddings and "lm_head.weight" in state:
        output_embedding = state.pop("lm_head.weight")
        if embedding in state and not torch.equal(output_embedding, state[embedding]):
            raise ExportError(
                f"{location}: lm_head.weight differs from the input embedding, and tie_word_embeddings says that they "
                "are one matrix"
            )
    return state


# ------------------------------------------------------------------------------------------------------- shapes


def hf_tensor_shapes(config: ModelConfig, sources: Mapping[str, TensorSource]) -> dict[str, torch.Size]:
    """Return the shape of each tensor of a format, by its name.

    The tensors are built from ours on the meta device, which takes no memory. `sources` says from which of ours each is
    made.
    """
    our_tensors = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(config).items()}
    return {name: build_hf_tensor(our_tensors, config, source).shape for name, source in sources.items()}


def check_tensors(state_dict: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], location: str) -> None:
    """Raise ExportError if tensors are missing, unexpected, of a wrong shape or of a dtype that cannot be read.

    expected: the name and shape of each tensor that must be there. No other tensor may be.
    location: where the tensors are, for the error, which names all tensors that have the first problem found.
    """
    missing_names = [name for name in expected if name not in state_dict]
    if missing_names:
        raise _tensor_error(location, missing_names, "is missing; the model's configuration asks for it")

    misshapen_names = [name for name, shape in expected.items() if state_dict[name].shape != shape]
    if misshapen_names:
        shape = list(state_dict[misshapen_names[0]].shape)
        expected_shape = list(expected[misshapen_names[0]])
        problem = f"has shape {shape}, the model's configuration says {expected_shape}"
        raise _tensor_error(location, misshapen_names, problem)

    # Quantised weights are packed into integers.
    packed_names = [name for name in expected if state_dict[name].dtype not in WEIGHT_DTYPES]
    if packed_names:
        dtype = str(state_dict[packed_names[0]].dtype).removeprefix("torch.")
        raise _tensor_error(location, packed_names, f"is {dtype}; expected fp32, bf16 or fp16")

    # A tensor that is not used means that the model computes something else.
    unknown_names = [name for name in state_dict if name not in expected]
    if unknown_names:
        raise _tensor_error(location, unknown_names, "has no place in the model's configuration")


def _tensor_error(location: str, names: Sequence[str], problem: str) -> ExportError:
    """Return an error about a problem of one or more tensors.

    names: the tensors. The text describes the problem of the first, and lists up to MAX_LISTED_TENSORS others.
    problem: the end of a sentence that begins with the tensor's name, such as "is missing".
    """
    first_name, *other_names = names
    text = f"{location}: tensor {first_name} {problem}"
    if other_names:
        text += f"; likewise {', '.join(other_names[:MAX_LISTED_TENSORS])}"
    num_unlisted = len(other_names) - MAX_LISTED_TENSORS
    if num_unlisted > 0:
        text += f" and {num_unlisted} more"
    return ExportError(text)
