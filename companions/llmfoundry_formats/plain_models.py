"""Causal language models that only transformers can compute, evaluated with its code and with one text in each row.

`open_plain` checks a folder's config.json, and `load_plain` loads and checks the model. A folder is refused if the
model is not what its config.json says: transformers ignores one of its options, weights are missing or packed, or
tokens see later ones. Code in a folder is never run. `PlainModel` has the methods that the evaluation calls.

Shapes: b rows, t tokens, c columns (positions of a row whose logits are needed), v vocabulary, d width, u tokens of
answers.
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
"""Keys of config.json that change logits. transformers ignores a key that a model's class does not declare."""
LOADING_FAULTS = {
    "missing_keys": "lacks weights of its model",  # transformers would draw them at random
    "unexpected_keys": "has weights that its model has no place for",
    "mismatched_keys": "has weights of other shapes than its model",
}
FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
"""dtypes of weights, as safetensors names them, that are not packed."""
MAX_PROBED_TOKENS = 1024
"""Length of the row in which attention to later tokens is looked for. Five such rows cost less than a small task."""
MAX_ROUNDING_FP32 = 1e-4
MAX_ROUNDING = 1e-2
"""Changes of earlier logits, relative to those of later ones, that are rounding alone: in fp32, and in other dtypes."""
DEFAULT_MAX_SEQ_LEN = 2048
"""Tokens in a row for a model whose config.json has no limit."""


def open_plain(folder: Path) -> Callable[[Placement], "PlainModel"]:
    """Check a folder's config.json, and return a function that loads the model onto a device.

    Raises DataError if the model cannot be loaded or would not be what config.json says.
    """
    read_plain_config(folder)
    return lambda placement: load_plain(folder, placement)


def read_plain_config(folder: Path) -> Any:
    """Return transformers' configuration of the model.

    Raises DataError if transformers does not know the type of the model, or would ignore one of DECISIVE_OPTIONS.
    """
    from transformers import AutoConfig

    with _loading_errors_as_data_errors(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)

    declared_keys = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    hf_config = read_hf_config(folder)
    for key in DECISIVE_OPTIONS:
        if hf_config.get(key) is not None and key not in declared_keys:
            raise DataError(
                f"models: {folder}: {key} is {json.dumps(hf_config[key])} in config.json, and transformers' "
                f"{config.model_type} ignores it; expected a model that has it"
            )
    return config


@contextmanager
def _loading_errors_as_data_errors(folder: Path) -> Iterator[None]:
    """Raise DataError for whatever transformers, its readers of files and a model's forward pass raise."""
    try:
        yield
    except Exception as error:
        # transformers asks for trust_remote_code=True if the model's class is a Python file in the folder.
        if "trust_remote_code" in str(error):
            class_names = (read_hf_config(folder).get("auto_map") or {}).values()
            code = ", ".join(map(str, class_names))
            raise DataError(
                f"models: {folder} needs its own code ({code or 'auto_map'}), which is not run; expected a model "
                "that transformers itself supports"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"models: {folder} is no causal language model that transformers loads: {reason}") from error


def load_plain(folder: Path, placement: Placement) -> "PlainModel":
    """Load a model with transformers, on the device and in the dtype of `placement`.

    Raises DataError or ExportError unless it is the causal language model that its config.json describes.
    """
    from transformers import AutoModelForCausalLM

    config = read_plain_config(folder)

    # Unless config.json tells it how to unpack weights, transformers reads packed ones as plain numbers.
    dtypes = read_dtypes(folder)
    packed = [name for name, dtype in dtypes.items() if name.endswith(".weight") and dtype not in FLOAT_DTYPES]
    if packed and not read_hf_config(folder).get("quantization_config"):
        raise DataError(
            f"models: {folder}: tensor {packed[0]} is {dtypes[packed[0]]}, and config.json has no quantization_config; "
            f"expected {', '.join(FLOAT_DTYPES)}"
        )

    with _loading_errors_as_data_errors(folder):
        model_and_report: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=placement.dtype, output_loading_info=True, trust_remote_code=False
        )
    model, loading_report = model_and_report
    for report_key, fault in LOADING_FAULTS.items():
        tensor_names = sorted(map(str, loading_report[report_key]))
        if tensor_names:
            raise DataError(f"models: {folder} {fault}: {tensor_names[0]} and {len(tensor_names) - 1} more")

    # The first forward passes: the model may be unable to compute what its config.json says.
    with _loading_errors_as_data_errors(folder):
        plain = PlainModel(model.to(placement.device).eval(), placement.device)
        sees_ahead = _sees_ahead(plain)
    if sees_ahead:
        raise DataError(
            f"models: {folder}: later tokens change its earlier logits, so it is no causal language model; its "
            f"model_type is {config.model_type!r}"
        )
    return plain


@torch.no_grad()
def _sees_ahead(model: "PlainModel") -> bool:
    """Return whether a change of later tokens changes earlier logits by more than rounding does.

    A row of random tokens is computed once, and then again with all tokens replaced from some index on. In a causal
    model, no logits before this index change. The indices are odd, so that a model whose tokens all see each other
    within blocks (of 2, 4, … tokens) has a block that begins before the index and ends after it.
    """
    length = min(MAX_PROBED_TOKENS, model.max_seq_len)
    candidate_starts = (1, length // 4 | 1, length // 2 | 1, length - 1)
    starts = {start for start in candidate_starts if 0 < start < length}
    if not starts:
        return False  # a row of one token has no later ones

    # Adding 1 to v - 1, modulo v, gives a different token everywhere.
    generator = torch.Generator().manual_seed(0)
    tokens_1t = torch.randint(model.vocab_size, (1, length), generator=generator).to(model.device)
    steps_1t = torch.randint(1, max(2, model.vocab_size), (1, length), generator=generator).to(model.device)
    other_tokens_1t = (tokens_1t + steps_1t) % model.vocab_size

    # Logits of every position would take much memory: one in 8 is compared, and both sides of each change.
    columns = {*range(0, length, 8), *starts, *(start - 1 for start in starts)}
    columns_c = torch.tensor(sorted(columns)).to(model.device)
    expected_1cv = model.logits(tokens_1t, columns_c).float()
    is_fp32 = next(model.model.parameters()).dtype == torch.float32
    tolerance = MAX_ROUNDING_FP32 if is_fp32 else MAX_ROUNDING

    for start in starts:
        changed_1t = torch.cat([tokens_1t[:, :start], other_tokens_1t[:, start:]], dim=1)
        difference_1cv = model.logits(changed_1t, columns_c).float() - expected_1cv
        difference_c = difference_1cv[0].abs().amax(dim=-1)
        before = difference_c[columns_c < start].max()
        after = difference_c[columns_c >= start].max()
        if before > tolerance * after:
            return True
    return False


class PlainModel:
    """Any causal language model of transformers, with the methods that the evaluation calls.

    Rows are padded on the right, where causal attention never looks. They share no prefixes, and a row is one text.
    """

    shares_prefixes = False
    separates_documents = False
    separator: Separator | None = None

    def __init__(self, model: Any, device: torch.device):
        """Wrap a model that is on `device`. Its last layer is changed to return fp32 logits."""
        self.model = model
        self.device = device
        _make_fp32_logits(model)
        self.keeps_columns = "logits_to_keep" in inspect.signature(model.forward).parameters
        """Whether the model can compute the logits of some positions alone."""

        # Models that read more than text have the options of the language model in a block of their own.
        config = getattr(model.config, "text_config", model.config)
        self.vocab_size = int(config.vocab_size)

        # Families have different names for the limit, and some write -1 for none.
        limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
        positive_limits = [int(limit) for limit in limits if limit and int(limit) > 0]
        self.max_seq_len = positive_limits[0] if positive_limits else DEFAULT_MAX_SEQ_LEN
        # RoBERTa's table begins with the positions of padding, so it has fewer for tokens than config.json says.
        for name, table in model.named_modules():
            if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
                self.max_seq_len = min(self.max_seq_len, table.num_embeddings - table.padding_idx - 1)

    def score(self, inputs: Inputs, answers: AnswerTokens) -> Scores:
        """Score the tokens of answers in a batch of rows, from the logits of their columns."""
        assert inputs.positions_bt is None, "rows are plain text"
        columns_c, column_index_u = answers.columns_u.unique(return_inverse=True)
        logits_bcv = self.logits(inputs.tokens_bt, columns_c)
        return score_logits([logits_bcv[answers.rows_u, column_index_u].float()], answers)

    def logits(self, tokens_bt: torch.Tensor, columns_c: torch.Tensor) -> torch.Tensor:
        """Return the logits [b, c, v] at some columns of the rows."""
        if self.keeps_columns:
            return self.model(input_ids=tokens_bt, logits_to_keep=columns_c).logits
        return self.model(input_ids=tokens_bt).logits[:, columns_c]

    @torch.no_grad()
    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the likeliest next token again and again, at most `max_new_tokens` times."""
        tokens_1t = torch.tensor([context], device=self.device)
        cache = None
        for _ in range(max_new_tokens):
            with without_cudnn():
                output = self.model(input_ids=tokens_1t, past_key_values=cache, use_cache=True)
            logits_11v = output.logits[:, -1:].float()
            check_finite(logits_11v)
            next_11 = logits_11v.argmax(dim=-1)
            yield int(next_11)

            # The oldest models have no cache, and recurrent ones another kind: both read the whole text again.
            cache = getattr(output, "past_key_values", None)
            tokens_1t = torch.cat([tokens_1t, next_11], dim=1) if cache is None else next_11


def _make_fp32_logits(model: Any) -> None:
    """Replace the forward of a model's last layer, unless it is fp32 already, by one that computes in fp32.

    Our own model does the same. Logits that are rounded to bf16 are often equal, and ties change which answer wins.
    """
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head: Any = get_head() if get_head is not None else None
    if not isinstance(head, nn.Linear) or head.weight.dtype == torch.float32:
        return

    def forward_fp32(hidden_btd: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden_btd.float(), head.weight.float(), bias)

    module: Any = head
    module.forward = forward_fp32
