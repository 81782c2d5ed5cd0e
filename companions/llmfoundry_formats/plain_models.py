"""Causal language models that only transformers can compute, evaluated as they are, row by row.

A folder is refused where the model is not what its config.json says: it has options that transformers ignores, weights
are missing or packed, tokens see later ones. Code in a folder is never run.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmfoundry_lite.convert.files import read_dtypes
from llmfoundry_lite.convert.huggingface import read_hf_config
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.models import Placement
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.scoring import AnswerTokens, Inputs, Scores, score_logits
from llmfoundry_lite.models.attention import without_cudnn
from llmfoundry_lite.models.generate import check_finite

DECISIVE_OPTIONS = (
    *("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling", "query_pre_attn_scalar"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "sliding_window", "qk_ln", "qk_norm"),
)
"""Keys of config.json that change logits. transformers ignores any that a model's class does not declare."""
FAULTS = {
    "missing_keys": "lacks weights of its model",  # transformers would draw them at random
    "unexpected_keys": "has weights that its model has no place for",
    "mismatched_keys": "has weights of other shapes than its model",
}
FLOATS = ("F32", "BF16", "F16", "F64")
MAX_PROBED_TOKENS = 1024
"""Attention to later tokens is looked for in so many, and no further. Five such rows cost less than a small task."""


def open_plain(folder: Path) -> Callable[[Placement], "PlainModel"]:
    """Return a function that loads the folder's model. Raises DataError where its config.json rules that out."""
    read_plain_config(folder)
    return lambda at: load_plain(folder, at)


def read_plain_config(folder: Path) -> Any:
    """Return transformers' description of the model. Raises DataError."""
    from transformers import AutoConfig

    with _refuse_what_fails(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    declared = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    hf_config = read_hf_config(folder)
    for key in DECISIVE_OPTIONS:
        if hf_config.get(key) is not None and key not in declared:
            raise DataError(
                f"models: {folder}: {key} is {json.dumps(hf_config[key])} in config.json, and transformers' "
                f"{config.model_type} ignores it; expected a model that has it"
            )
    return config


@contextmanager
def _refuse_what_fails(folder: Path) -> Iterator[None]:
    """Turn whatever transformers, its readers and such models raise into a DataError."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            code = ", ".join(map(str, (read_hf_config(folder).get("auto_map") or {}).values()))
            raise DataError(
                f"models: {folder} needs code of its own ({code or 'auto_map'}), which is not run; expected a model "
                "that transformers has itself"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"models: {folder} is no causal language model that transformers loads: {reason}") from error


def load_plain(folder: Path, at: Placement) -> "PlainModel":
    """Load a model of transformers. Raises DataError or ExportError unless it is the causal model that it claims."""
    from transformers import AutoModelForCausalLM

    config, dtypes = read_plain_config(folder), read_dtypes(folder)
    # Unless it is told how to unpack weights, transformers reads packed ones as plain numbers.
    packed = [name for name, of in dtypes.items() if name.endswith(".weight") and of not in FLOATS]
    if packed and not read_hf_config(folder).get("quantization_config"):
        raise DataError(
            f"models: {folder}: tensor {packed[0]} is {dtypes[packed[0]]}, and config.json has no quantization_config; "
            f"expected {', '.join(FLOATS)}"
        )
    with _refuse_what_fails(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=at.dtype, output_loading_info=True, trust_remote_code=False
        )
    model, found = loaded
    for kind, fault in FAULTS.items():
        if names := sorted(map(str, found[kind])):
            raise DataError(f"models: {folder} {fault}: {names[0]} and {len(names) - 1} more")
    with _refuse_what_fails(folder):  # such a model may not compute what its config.json promises
        plain = PlainModel(model.to(at.device).eval(), at.device)
        sees_ahead = _sees_ahead(plain)
    if sees_ahead:
        raise DataError(
            f"models: {folder}: later tokens change its earlier logits, so it is no causal language model; its "
            f"model_type is {config.model_type!r}"
        )
    return plain


@torch.no_grad()
def _sees_ahead(model: "PlainModel") -> bool:
    """Return whether a change of later tokens changes earlier logits, and not by rounding alone.

    Changes begin at odd indices, so that a block whose tokens all see each other is cut in two.
    """
    length = min(MAX_PROBED_TOKENS, model.max_seq_len)
    places = {place for place in (1, length // 4 | 1, length // 2 | 1, length - 1) if 0 < place < length}
    if not places:
        return False
    generator = torch.Generator().manual_seed(0)
    tokens_1t = torch.randint(model.vocab_size, (1, length), generator=generator).to(model.device)
    steps_1t = torch.randint(1, max(2, model.vocab_size), (1, length), generator=generator).to(model.device)
    others_1t = (tokens_1t + steps_1t) % model.vocab_size
    columns_c = torch.tensor(sorted({*range(0, length, 8), *places, *(place - 1 for place in places)})).to(model.device)
    expected_1cv = model.logits(tokens_1t, columns_c).float()
    tolerance = 1e-4 if next(model.model.parameters()).dtype == torch.float32 else 1e-2
    for place in places:
        changed_1t = torch.cat([tokens_1t[:, :place], others_1t[:, place:]], dim=1)
        apart_c = (model.logits(changed_1t, columns_c).float() - expected_1cv)[0].abs().amax(dim=-1)
        if apart_c[columns_c < place].max() > tolerance * apart_c[columns_c >= place].max():
            return True
    return False


class PlainModel:
    """Any causal language model of transformers. Padding is on the right, where causal attention never looks."""

    shares_prefixes = False
    separates_documents = False
    separator: Separator | None = None

    def __init__(self, model: Any, device: torch.device):
        self.model = model
        self.device = device
        _make_fp32_logits(model)
        self.keeps_columns = "logits_to_keep" in inspect.signature(model.forward).parameters
        config = getattr(model.config, "text_config", model.config)  # models that read more than text keep it there
        self.vocab_size = int(config.vocab_size)
        names = ("max_position_embeddings", "n_positions", "max_seq_len")
        said = [int(value) for name in names if (value := getattr(config, name, None))]
        self.max_seq_len = next((value for value in said if value > 0), 2048)  # -1 where there is no limit
        for name, table in model.named_modules():  # RoBERTa's table of positions begins with padding's
            if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
                self.max_seq_len = min(self.max_seq_len, table.num_embeddings - table.padding_idx - 1)

    def score(self, inputs: Inputs, answers: AnswerTokens) -> Scores:
        assert inputs.positions_bt is None, "rows are plain text"
        columns_c, which_u = answers.columns_u.unique(return_inverse=True)
        logits_bcv = self.logits(inputs.tokens_bt, columns_c)
        return score_logits([logits_bcv[answers.rows_u, which_u].float()], answers)

    def logits(self, tokens_bt: torch.Tensor, columns_c: torch.Tensor) -> torch.Tensor:
        """Return logits [b, c, v] of the columns."""
        if self.keeps_columns:
            return self.model(input_ids=tokens_bt, logits_to_keep=columns_c).logits
        return self.model(input_ids=tokens_bt).logits[:, columns_c]

    @torch.no_grad()
    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        tokens_1t, past = torch.tensor([context], device=self.device), None
        for _ in range(max_new_tokens):
            with without_cudnn():
                output = self.model(input_ids=tokens_1t, past_key_values=past, use_cache=True)
            logits_11v = output.logits[:, -1:].float()
            check_finite(logits_11v)
            next_11 = logits_11v.argmax(dim=-1)
            yield int(next_11)
            # The oldest models have no cache, and recurrent ones another kind: both read the whole text again.
            past = getattr(output, "past_key_values", None)
            tokens_1t = torch.cat([tokens_1t, next_11], dim=1) if past is None else next_11


def _make_fp32_logits(model: Any) -> None:
    """Let the last layer of a model in another precision compute in fp32, as ours does: rounded logits make ties."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear) and head.weight.dtype != torch.float32:

        def in_fp32(hidden_btd: torch.Tensor) -> torch.Tensor:
            bias = None if head.bias is None else head.bias.float()
            return nn.functional.linear(hidden_btd.float(), head.weight.float(), bias)

        module: Any = head
        module.forward = in_fp32
