"""A model for programs: loaded from a run, a checkpoint or a Hugging Face folder, asked for text and probabilities."""

import os
import warnings
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.devices import device_type
from llmfoundry_lite.errors import ConfigError, DataError, either
from llmfoundry_lite.evaluation.models import DTYPES, Subject, TreeModel, load_subject
from llmfoundry_lite.evaluation.packing import pack
from llmfoundry_lite.evaluation.scoring import check_tokens, score_tokens, text_separator
from llmfoundry_lite.evaluation.tasks import Request, document_of, windows_of
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.mpt import MPT

MAX_BATCH_TOKENS = 4096
"""Tokens of a forward pass, or one text's if that is longer."""
INCOMPLETE = "\ufffd"
"""A decoder's stand-in for a character whose bytes have not all arrived."""
_one_at_a_time = Lock()
"""PyTorch's choice of attention kernels, which a forward pass sets and restores, is of the process, not of a thread."""


class LoadedModel:
    """A model with its tokenizer. Threads may share it; they take turns."""

    def __init__(self, subject: Subject):
        self._subject = subject
        self.source: str = subject.source
        """The checkpoint or folder it was read from."""
        self.model: nn.Module = subject.model.model
        """The module itself: our MPT, or that of transformers."""
        self.tokenizer: Tokenizer = subject.tokenizer
        self.manifest: Manifest | None = subject.manifest
        """The checkpoint's: timestamp, configuration, history. None for a Hugging Face folder."""

    def __repr__(self) -> str:
        return f"<{type(self.model).__name__} from {self.source}>"

    def logprobs(self, texts: Sequence[str]) -> list[NDArray[np.float32]]:
        """Return the log-probability of each token of each text, in nats, given all before it.

        Tokens are those of `tokenizer.encode(text)`. The first one follows the token that begins or ends a text. A text
        that is longer than the context is read in windows, as in rolling perplexity. An empty text has no tokens.

        >>> model = lf.load("runs/tiny")
        >>> short, empty = model.logprobs(["def one():", ""])
        >>> len(short) == len(model.tokenizer.encode("def one():")), len(empty), bool((short < 0).all())
        (True, 0, True)

        Raises DataError for tokens that the model does not have.
        """
        if isinstance(texts, str):
            raise TypeError("logprobs takes a list of texts, not one text")
        scorable, owners, requests = self._subject.model, list[int](), list[Request]()
        for number, text in enumerate(texts):
            document = document_of(_checked(text), self.tokenizer)
            check_tokens(scorable, document.ids, self.source)
            for request in windows_of(document, self.tokenizer, scorable.max_seq_len):
                owners.append(number)
                requests.append(request)
        values: list[list[float]] = [[] for _ in requests]
        separator = text_separator(scorable, self.tokenizer.eos_token_id)
        with _one_at_a_time:
            for batch in pack([[request] for request in requests], MAX_BATCH_TOKENS, shares=False):
                for number, value, _ in score_tokens(scorable, batch, separator):
                    values[number].append(value)
        found: list[list[float]] = [[] for _ in texts]
        for owner, some in zip(owners, values, strict=True):
            found[owner] += some
        return [np.array(some, np.float32) for some in found]

    # The settings of sampling, each with a default.
    def generate(
        self,
        prompt: str = "",
        num_tokens: int = 200,
        *,
        temperature: float = 0.8,
        top_k: int | None = 50,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """Return the text that follows `prompt`: up to `num_tokens` tokens, or to the end of text.

        Temperature 0 takes the likeliest token. The same seed gives the same text again.

        >>> model = lf.load("runs/tiny")
        >>> model.generate("def ", 8, seed=1) == model.generate("def ", 8, seed=1)
        True

        Raises DataError for a model that transformers alone can run, ConfigError for numbers that cannot be.
        """
        if (
            not temperature >= 0
            or num_tokens < 0
            or (1 if top_k is None else top_k) < 1
            or not 0 < (1 if top_p is None else top_p) <= 1
        ):
            raise ConfigError(
                f"generate: num_tokens {num_tokens}, temperature {temperature}, top_k {top_k}, top_p {top_p} given, "
                "expected 0 or more, 0 or more, 1 or more, and above 0 and up to 1"
            )
        model = model_of(self._subject)
        check_tokens(self._subject.model, self.tokenizer.encode(_checked(prompt)), self.source)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        device = self._subject.model.device
        with _one_at_a_time:
            return "".join(generate_text(model, self.tokenizer, prompt, num_tokens, device=device, **sampling))


def load(
    where: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    precision: str = "fp32",
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Load a model from a run, a checkpoint, a Hugging Face folder or `hf:NAME`. Every block is verified as it is read.

    A run gives its newest intact checkpoint, with a warning for each newer one that is not. MPT, GPT-2, Llama, Mistral
    and Qwen become our MPT; transformers runs other causal models. Code that a folder brings is never run.

    >>> model = lf.load("runs/tiny")
    >>> model
    <MPT from runs/tiny/checkpoints/ba6>
    >>> model.manifest.timestamp.batch, sum(p.numel() for p in model.model.parameters())
    (6, ...)

    `tokenizer` is a folder or a Hub name, by default the model's own. `precision` is fp32, bf16 or fp16.

    Raises DataError if there is no model or no tokenizer, and CheckpointError for weights that do not verify.
    """
    allowed = [name for name in DTYPES if name != "tf32"]  # which is a setting of the process, not of a model
    if precision not in allowed:
        raise ConfigError(f"load: precision {precision!r} given, expected {either(allowed)}")
    chosen = torch.device(device or device_type())
    subject = load_subject(os.fspath(where), tokenizer=tokenizer, precision=precision, device=chosen)
    for note in subject.notes:
        warnings.warn(note, stacklevel=2)
    return LoadedModel(subject)


def _checked(text: str) -> str:
    """Return `text`. Raises DataError for halves of surrogate pairs, which no UTF-8 has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text cannot be written in UTF-8: {error}") from error
    return text


def model_of(subject: Subject) -> MPT:
    """Return the model of a loaded subject. Raises DataError for one that only transformers can run."""
    if not isinstance(subject.model, TreeModel):
        raise DataError(
            f"{subject.source}: text is written by models in MPT's, GPT-2's and Llama's layouts; this one can only be "
            "evaluated. Use transformers' own generate()"
        )
    return subject.model.model


def generate_text(
    model: MPT,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    *,
    device: torch.device | None = None,
    **sampling: Any,
) -> Iterator[str]:
    """Yield pieces of text that follow `prompt`, up to `num_tokens` tokens or the end of text.

    `sampling` is for `models.generate`: temperature, top_k, top_p and seed.
    """
    asked = tokenizer.encode(prompt) or [tokenizer.eos_token_id]
    written: list[int] = []
    shown = ""
    for token in generate(model, torch.tensor(asked, device=device), num_tokens, **sampling):
        if token in tokenizer.stop_token_ids:
            break
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith(INCOMPLETE):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(written)[len(shown) :]
