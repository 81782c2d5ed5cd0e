"""A model for use in programs: `load` reads it from a run, a checkpoint or a Hugging Face folder.

The result, a `LoadedModel`, computes logits and log-probabilities, and generates text. As in an evaluation, `models.py`
finds and loads the model, and `packing.py` and `scoring.py` score.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from operator import index
from threading import Lock
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.devices import device_type
from llmfoundry_lite.errors import ConfigError, DataError, join_with_or
from llmfoundry_lite.evaluation.documents import document_of, windows_of
from llmfoundry_lite.evaluation.items import Request
from llmfoundry_lite.evaluation.models import LocatedModel, TreeModel, locate_and_load_model
from llmfoundry_lite.evaluation.packing import pack
from llmfoundry_lite.evaluation.scoring import check_tokens, score_tokens, text_separator
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.mpt import MPT

MAX_BATCH_TOKENS = 4096
"""Most tokens of a forward pass, unless one text has more."""
PRECISION_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PRECISIONS = PRECISION_OF_DTYPE | {name: name for name in PRECISION_OF_DTYPE.values()}
"""Name of a dtype, as `load` takes it -> its precision."""
INCOMPLETE = "\ufffd"
"""The replacement character, which a decoder returns for a character of which only some bytes have been generated."""
MAX_SEED = 2**63 - 1
"""The largest seed that torch takes."""
_one_at_a_time = Lock()
"""Lock for forward passes: each sets and restores PyTorch's choice of attention kernels, which is per process."""


class Sampling(TypedDict, total=False):
    """How the next token is drawn."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


class LoadedModel:
    """A model with its tokenizer. Threads may share it; they take turns."""

    def __init__(self, located: LocatedModel):
        self._located = located
        self.source: str = located.source
        """The checkpoint or folder it was read from."""
        self.model: nn.Module = located.model.model
        """The module itself: our MPT, or that of transformers."""
        self.tokenizer: Tokenizer = located.tokenizer
        self.manifest: Manifest | None = located.manifest
        """The checkpoint's: timestamp, configuration, history. None for a Hugging Face folder."""

    def __repr__(self) -> str:
        return f"<{type(self.model).__name__} from {self.source}>"

    def __fspath__(self) -> str:
        """Return where the model was read, so that it can be given in place of a path, as to `lf.evaluate`."""
        return self.source

    @torch.no_grad()
    def __call__(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits [b, t, vocabulary] of the next token after each token of rows without padding.

        >>> import torch
        >>> model = lf.load("runs/tiny")
        >>> tokens_bt = torch.tensor([model.tokenizer.encode("def one():")])
        >>> logits_btv = model(tokens_bt)
        >>> logits_btv.shape[:2] == tokens_bt.shape, logits_btv.dtype
        (True, torch.float32)

        Computes no gradients. To get gradients, call the module itself after `model.model.requires_grad_()`.
        """
        with _one_at_a_time:
            output = self.model(tokens_bt.to(self._located.model.device))
        logits = getattr(output, "logits", output)  # transformers' modules wrap logits
        return logits.float()

    @overload
    def logprobs(self, texts: str) -> NDArray[np.float32]: ...
    @overload
    def logprobs(self, texts: Iterable[str]) -> list[NDArray[np.float32]]: ...

    def logprobs(self, texts: str | Iterable[str]) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Return the log-probability of each token of a text given all tokens before it, in nats.

        Returns an array for one text, and a list of arrays for several. The tokens are those of
        `tokenizer.encode(text)`. The first token is predicted after the token that begins or ends a text. A text that
        is longer than the context is read in windows, as in rolling perplexity. An empty text has no tokens.

        >>> model = lf.load("runs/tiny")
        >>> short, empty = model.logprobs(["def one():", ""])
        >>> len(short) == len(model.tokenizer.encode("def one():")), len(empty), bool((short < 0).all())
        (True, 0, True)

        Raises ConfigError if something is not a text, DataError for tokens that the model does not have.
        """
        # Tokenise each text, and cut it into windows, each of which is a request.
        text_list = _check_texts("logprobs", texts)
        scorable = self._located.model
        requests: list[Request] = []
        text_of_request: list[int] = []
        """For each request, the number of its text."""
        for text_number, text in enumerate(text_list):
            document = document_of(text, self.tokenizer)
            check_tokens(scorable, document.ids, self.source)
            for request in windows_of(document, self.tokenizer, scorable.max_seq_len):
                requests.append(request)
                text_of_request.append(text_number)

        # Score the requests of all texts in batches. Batches have them in another order, so each token names its own.
        logprobs_of_request: list[list[float]] = [[] for _ in requests]
        separator = text_separator(scorable, self.tokenizer.eos_token_id)
        batches = pack([[request] for request in requests], MAX_BATCH_TOKENS, shares=False)
        with _one_at_a_time:
            for batch in batches:
                for token in score_tokens(scorable, batch, separator):
                    logprobs_of_request[token.request].append(token.log_probability)

        # Join the windows of each text again.
        logprobs_of_text: list[list[float]] = [[] for _ in text_list]
        for text_number, logprobs in zip(text_of_request, logprobs_of_request, strict=True):
            logprobs_of_text[text_number] += logprobs
        arrays = [np.array(logprobs, np.float32) for logprobs in logprobs_of_text]
        return arrays[0] if isinstance(texts, str) else arrays

    @overload
    def generate(self, prompt: str = "", max_new_tokens: int = 200, **sampling: Unpack[Sampling]) -> str: ...
    @overload
    def generate(self, prompt: Iterable[str], max_new_tokens: int = 200, **sampling: Unpack[Sampling]) -> list[str]: ...

    # The settings of sampling, each with a default.
    def generate(
        self,
        prompt: str | Iterable[str] = "",
        max_new_tokens: int = 200,
        *,
        temperature: float = 0.8,
        top_k: int | None = 50,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str | list[str]:
        """Return the text that follows `prompt`: up to `max_new_tokens` tokens, or to the end of text.

        `temperature` divides the logits before sampling; 0 always takes the most likely token. `top_k` keeps that many
        most likely tokens, and `top_p` the fewest whose probabilities add up to it; None keeps all. The same seed gives
        the same text again. A list of prompts gives a list of texts, each the same as if its prompt were given alone.

        >>> model = lf.load("runs/tiny")
        >>> model.generate("def ", max_new_tokens=8, seed=1) == model.generate("def ", max_new_tokens=8, seed=1)
        True
        >>> len(model.generate(["def ", "import "], max_new_tokens=8))
        2

        Raises DataError for a model that only transformers can run, ConfigError for impossible settings.
        """
        # Check the settings. `index` takes any integer type, such as numpy's, and raises TypeError for anything else.
        try:
            num_tokens = index(max_new_tokens)
            integer_seed = index(seed)
            num_likeliest = None if top_k is None else index(top_k)
            is_top_k_possible = num_likeliest is None or num_likeliest >= 1
            is_top_p_possible = top_p is None or 0 < top_p <= 1
            are_numbers_possible = num_tokens >= 0 and temperature >= 0 and abs(integer_seed) <= MAX_SEED
            are_settings_possible = are_numbers_possible and is_top_k_possible and is_top_p_possible
        except TypeError:
            are_settings_possible = False
        if not are_settings_possible:
            raise ConfigError(
                f"generate: max_new_tokens {max_new_tokens!r}, temperature {temperature!r}, top_k {top_k!r}, top_p "
                f"{top_p!r}, seed {seed!r} given, expected a whole number from 0 on, 0 or more, a whole number from 1 "
                "on or None, above 0 and up to 1 or None, and a whole number"
            )

        # Check all prompts before any text is generated.
        model = model_of(self._located)
        prompts = _check_texts("generate", prompt)
        for prompt_text in prompts:
            check_tokens(self._located.model, self.tokenizer.encode(prompt_text), self.source)

        texts: list[str] = []
        with _one_at_a_time:
            for prompt_text in prompts:
                pieces = generate_text(
                    model,
                    self.tokenizer,
                    prompt_text,
                    num_tokens,
                    temperature=temperature,
                    top_k=num_likeliest,
                    top_p=top_p,
                    seed=integer_seed,
                    device=self._located.model.device,
                )
                texts.append("".join(pieces))
        return texts[0] if isinstance(prompt, str) else texts


def load(
    where: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | int | torch.device | None = None,
    trust_code: bool = False,
) -> LoadedModel:
    """Load a model from a run, a checkpoint, a Hugging Face folder or `hf:NAME`. Verifies every block that it reads.

    From a run, it loads the newest intact checkpoint, and warns about each newer one that is damaged. MPT, GPT-2,
    Llama, Mistral and Qwen are loaded into this package's MPT; transformers runs other causal models. Code in a folder
    is never run. Code that a checkpoint names for parts of its model (`python:`) is run with `trust_code` alone.

    >>> model = lf.load("runs/tiny")
    >>> model
    <MPT from runs/tiny/checkpoints/ba6>
    >>> model.manifest.timestamp.batch, sum(p.numel() for p in model.model.parameters())
    (6, ...)

    `tokenizer` is a folder or a Hub name, by default the model's own. `dtype` is float32, bfloat16 or float16, as text
    or as torch has it.

    The result has these attributes: `model`, the module itself; `tokenizer`, with `encode` and `decode`; `source`, the
    checkpoint or folder; `manifest`, the checkpoint's step, configuration and history, or None.

    Raises DataError if there is no model or no tokenizer, and CheckpointError for weights that do not verify.
    """
    precision = PRECISIONS.get(str(dtype).removeprefix("torch."))
    if precision is None:
        raise ConfigError(f"load: dtype {dtype!r} given, expected {join_with_or([*PRECISION_OF_DTYPE])}")

    # torch checks a device only when a tensor is put there, so an empty tensor is. It raises RuntimeError for a bad
    # name, and AssertionError for a device that this machine does not have.
    try:
        chosen_device = torch.empty(0, device=device_type() if device is None else device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"load: device {device!r} cannot be used: {str(error).splitlines()[0]}") from error

    tokenizer_path = None if tokenizer is None else os.fspath(tokenizer)
    located = locate_and_load_model(
        os.fspath(where),
        tokenizer=tokenizer_path,
        precision=precision,
        device=chosen_device,
        trusts_code=trust_code,
    )
    for note in located.notes:
        warnings.warn(note, stacklevel=2)
    return LoadedModel(located)


def _check_texts(caller: str, text_or_texts: str | Iterable[str]) -> list[str]:
    """Return one text or several, as a method of `LoadedModel` was given them, as a list.

    `caller` is the name of the method, for errors. Raises ConfigError for anything that is not a text, and DataError
    for a text with half of a surrogate pair, which UTF-8 cannot encode.
    """
    # Bytes are iterable, but count as one wrong value instead of many wrong numbers.
    is_single = isinstance(text_or_texts, str | bytes) or not isinstance(text_or_texts, Iterable)
    texts: list[Any] = [text_or_texts] if is_single else list(text_or_texts)
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(
                f"{caller}: {text!r:.60} given ({type(text).__name__}), expected a text or a list of texts"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the text cannot be written in UTF-8: {error}") from error
    return texts


def model_of(located: LocatedModel) -> MPT:
    """Return the MPT of a loaded model. Raises DataError for a model that only transformers can run."""
    if not isinstance(located.model, TreeModel):
        raise DataError(
            f"{located.source}: text is written by models in MPT's, GPT-2's and Llama's layouts; this one can only be "
            "evaluated. Use transformers' own generate()"
        )
    return located.model.model


def generate_text(
    model: MPT,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    device: torch.device | None = None,
    **sampling: Any,
) -> Iterator[str]:
    """Yield pieces of text that follow `prompt`, up to `max_new_tokens` tokens or the end of text.

    device: the model's device.
    sampling: the settings temperature, top_k, top_p and seed of `models.generate`.

    A piece is yielded as soon as its last character is complete, because a character may take several tokens. The
    pieces add up to the generated text.
    """
    prompt_ids = tokenizer.encode(prompt)
    decoded_prompt = tokenizer.decode(prompt_ids)
    new_ids: list[int] = []

    def decode_new_tokens() -> str:
        """Return the text of all new tokens. They are decoded with the prompt, because a decoder may drop a text's
        first space."""
        whole_text = tokenizer.decode([*prompt_ids, *new_ids])
        if whole_text.startswith(decoded_prompt):
            return whole_text.removeprefix(decoded_prompt)
        return tokenizer.decode(new_ids)  # the new tokens have changed how the end of the prompt is decoded

    # Without a prompt, the text begins as a new document.
    num_characters_yielded = 0
    context = torch.tensor(prompt_ids or [tokenizer.eos_token_id], device=device)
    for token_id in generate(model, context, max_new_tokens, **sampling):
        if token_id in tokenizer.stop_token_ids:
            break
        new_ids.append(token_id)
        text = decode_new_tokens()
        if not text.endswith(INCOMPLETE):
            yield text[num_characters_yielded:]
            num_characters_yielded = len(text)

    # At the end, even an incomplete character is yielded.
    yield decode_new_tokens()[num_characters_yielded:]
