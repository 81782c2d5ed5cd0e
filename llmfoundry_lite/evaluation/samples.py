"""Text that a model writes after a prompt, token by token, as `llmfoundry-lite generate` and reports show it."""

from collections.abc import Iterator
from typing import Any

import torch

from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.models import Subject, TreeModel
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.mpt import MPT

INCOMPLETE = "\ufffd"
"""A decoder's stand-in for a character whose bytes have not all arrived."""


def model_of(subject: Subject) -> MPT:
    """The model of a loaded subject. Raises DataError for one that only transformers can run."""
    if not isinstance(subject.model, TreeModel):
        raise DataError(
            f"{subject.source}: text is written by models in MPT's, GPT-2's and Llama's layouts; this one can only be "
            "evaluated. Use transformers' own generate()"
        )
    return subject.model.model


def write_text(
    model: MPT,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    *,
    device: torch.device | None = None,
    **sampling: Any,
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, up to `num_tokens` tokens or the end of text.

    `sampling`: temperature, top_k, top_p and seed, as in `models.generate`.
    """
    asked = tokenizer.encode(prompt) or [tokenizer.eos_token_id]
    written: list[int] = []
    shown = ""
    for token in generate(model, torch.tensor(asked, device=device), num_tokens, **sampling):
        if token == tokenizer.eos_token_id:
            break
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith(INCOMPLETE):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(written)[len(shown) :]
