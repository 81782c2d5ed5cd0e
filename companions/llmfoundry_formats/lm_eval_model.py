"""Our model as one of lm-evaluation-harness: see `lm_eval.py`, which starts it.

lm_eval asks a model three things: the log-probability of an answer after a context (`loglikelihood`), that of a whole
text (`loglikelihood_rolling`), and a text that continues a context (`generate_until`). It chooses prompts, examples and
metrics, and writes the files. Here, its requests become the core's (`Request`, `Prompt`), which the core's evaluation
computes. Several ranks divide the requests of each task, and give the same results as one.
"""

# pyright: reportMissingImports=false

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from llmfoundry_lite import devices
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.fields import POSITIVE, setting
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.harness import DataRank, Prompt, generate_answers, score_all
from llmfoundry_lite.evaluation.items import Request
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.evaluation.scoring import check_tokens
from llmfoundry_lite.evaluation.suite import BATCH_TOKENS
from llmfoundry_lite.ranks.exchange import user_errors_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.start import choose_device, start_process_group

GREEDY = {"do_sample": (False,), "temperature": (0.0,), "num_beams": (1,), "num_return_sequences": (1,)}
"""Settings of generation that ask for greedy answers, by their values. Any other value is refused."""
ACCEPTED_SETTINGS = ("until", "max_gen_toks", "top_k", "top_p")
"""Settings that may have any value: the first two are used, and the others change nothing unless a model samples."""
TIMEOUT_SECONDS = 600.0
"""Time that ranks wait for each other in a collective."""
CACHED_TEXTS = 4096
"""Number of texts whose tokens are kept, because the choices of an item share their context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArguments:
    """Keys of --model_args. One of the first three names the model."""

    run: str | None = None
    """A run: its newest intact checkpoint."""
    checkpoint: str | None = None
    """A checkpoint, on this disk or a URL."""
    hf: str | None = None
    """A folder of a Hugging Face model, or a name on the Hub."""
    path: str | None = None
    """Set by `create_from_arg_obj`, not by the user: lm_eval names its output folder after it."""
    tokenizer: str | None = None
    """A folder or name of a tokenizer. Default: the model's own."""
    precision: str = setting("fp32", choices="fp32 tf32 bf16 fp16")
    max_seq_len: int | None = setting(None, POSITIVE)
    """Tokens that the model reads at once. Default: as many as it was trained for."""
    max_gen_toks: int = setting(256, POSITIVE)
    """Tokens of a generated answer, for tasks that do not set their own limit."""
    device_batch_tokens: int | None = setting(None, POSITIVE)
    """Tokens in one forward pass; --batch_size is not used. Default: 2,048 on a CPU, 32,768 on an accelerator."""

    @property
    def model_source(self) -> str:
        """The model as `locate_and_load_model` takes it. Raises ConfigError unless exactly one is given."""
        models = {"run": self.run, "checkpoint": self.checkpoint, "hf": self.hf}
        given = {key: value for key, value in models.items() if value is not None}
        if len(given) != 1:
            raise ConfigError(
                f"model_args: {' and '.join(given) or 'no model'} given, expected one of run=RUN, checkpoint=PATH, "
                "hf=FOLDER_OR_NAME"
            )
        if self.hf is not None:
            return f"hf:{self.hf}"
        return str(self.run if self.run is not None else self.checkpoint)


class CheckpointLM(TemplateLM):
    """Our model, as lm_eval calls it. The base class encodes and divides context and answer as for `--model hf`.

    Every rank gets all requests, computes its part, and returns all results, so that lm_eval sees one rank. lm_eval
    writes its files on the rank whose LOCAL_RANK is 0.
    """

    def __init__(
        self, *, device: str | None = None, batch_size: Any = None, max_batch_size: Any = None, **model_args: Any
    ):
        """Load the model, and start the process group if there are several ranks. Collective.

        `device`, `batch_size` and `max_batch_size` are lm_eval's options, and `model_args` its --model_args, which are
        described in ModelArguments. Raises UserError for arguments that are unknown or do not fit together, and if
        `locate_and_load_model` cannot load the model.
        """
        super().__init__()
        text_keys = ("run", "checkpoint", "hf", "tokenizer")  # lm_eval reads run=7 as a number
        model_args = {key: str(value) if key in text_keys else value for key, value in model_args.items()}
        arguments: ModelArguments = build_block(ModelArguments, model_args, "model_args")
        model_source = arguments.model_source
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            _note("--batch_size is not used: requests are packed by tokens; set --model_args device_batch_tokens=…")

        rank = this_rank()
        devices.set_tf32(arguments.precision == "tf32")
        self._device = choose_device(_device_type(device, rank.world_size))
        if rank.world_size > 1:
            start_process_group(devices.device_type(), TIMEOUT_SECONDS)
            # On several nodes, several ranks have LOCAL_RANK=0, and each would write lm_eval's files.
            os.environ["LOCAL_RANK"] = str(rank.rank)
        self.data_rank = DataRank(rank.rank, rank.world_size)

        with user_errors_on_all_ranks():
            self.located = locate_and_load_model(
                model_source, tokenizer=arguments.tokenizer, precision=arguments.precision, device=self._device
            )
        for note in self.located.notes:
            _note(f"{note}; {self.located.source} is evaluated")

        self.model = self.located.model
        self.max_length = min(arguments.max_seq_len or self.model.max_seq_len, self.model.max_seq_len)
        self.max_gen_toks = arguments.max_gen_toks
        self.batch_tokens = arguments.device_batch_tokens or BATCH_TOKENS[self._device.type]
        self._encode = lru_cache(CACHED_TEXTS)(self.located.tokenizer.encode)
        self._beginning = self.located.tokenizer.beginning
        self._names_of_requests: list[str] = []
        """Names, for errors, of the requests that `loglikelihood` has passed to the base class."""

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """Build the model from lm_eval's command line. Adds `path` to `arg_dict`, which lm_eval reads afterwards."""
        model = super().create_from_arg_obj(arg_dict, additional_config)
        # lm_eval names the folder of its logs after pretrained=, model= or path=, and at random without them.
        given_model = next(arg_dict[key] for key in ("run", "checkpoint", "hf") if key in arg_dict)
        arg_dict.setdefault("path", given_model)
        return model

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text, for lm_eval."""
        return self.located.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that stands before a text without context, for lm_eval."""
        return self.located.tokenizer.prefix_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text, after the ids with which the tokenizer begins each text.

        The latter are left out with `add_special_tokens=False`. Special tokens that the text spells out are encoded as
        ordinary text.
        """
        beginning = [] if add_special_tokens is False else self._beginning
        return [*beginning, *self._encode(string)]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether every token is the likeliest) of each request's answer.

        The base class encodes the requests and calls `_loglikelihood_tokens` with them, in the same order. It does not
        pass names on, so they are kept in `_names_of_requests` until then. Collective. Raises DataError.
        """
        for request in requests:
            if not "".join(request.args):
                raise DataError(f"{name_of(request)} has no text at all; leave the task out, or repair the item")
        self._names_of_requests = [name_of(request) for request in requests]
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether every token is the likeliest) of each answer, in order.

        lm_eval's base class calls this from `loglikelihood`. `requests` are (texts, tokens of the context, tokens of
        the answer). Collective. Raises DataError.
        """
        fitted_requests = []
        for name, (_, context, answer) in zip(self._names_of_requests, requests, strict=True):
            fitted_requests.append(self._fit(context, answer, name))
        return self._score(fitted_requests, disable_tqdm)

    def _score(self, requests: Sequence[Request], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether every token is the likeliest) of each request's answer, in order.

        Collective.
        """
        num_cut = sum(request.num_trimmed > 0 for request in requests)
        if num_cut:
            _note(f"{num_cut:,} of {len(requests):,} contexts are cut from the left to fit {self.max_length:,} tokens")

        # The answers to one context make a group, because the core computes the context once for a group.
        indices_by_context: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            indices_by_context.setdefault(request.context, []).append(index)
        groups = [[requests[index] for index in indices] for indices in indices_by_context.values()]
        with self._progress("loglikelihood", len(groups), disable_tqdm) as update:
            scores = score_all(self.model, "lm_eval", groups, self.batch_tokens, self.data_rank, update)

        # Put the scores, which are in the order of the groups, back into the order of the requests.
        grouped_indices = itertools.chain.from_iterable(indices_by_context.values())
        score_by_index = dict(zip(grouped_indices, scores, strict=True))
        ordered = [score_by_index[index] for index in range(len(requests))]
        return [(score.log_probability, score.is_greedy) for score in ordered]

    def _fit(self, context: Sequence[int], answer: Sequence[int], name: str) -> Request:
        """Cut a context from the left until it and the answer fit into the model.

        `name` is the request's, for errors. Raises DataError for an answer without tokens, or one that does not
        fit by itself, and for token ids that the model does not have.
        """
        context = context or [self.prefix_token_id]  # lm_eval counts a context of spaces alone as part of the answer
        if not answer:
            raise DataError(
                f"{name}: the answer has no token of its own: it is empty, or shares its only token with the context; "
                "leave the task out, or begin the answer with a space"
            )
        # The model never reads the last token of the answer, only predicts it. At least one token of context is needed.
        max_context_tokens = self.max_length + 1 - len(answer)
        if max_context_tokens < 1:
            raise DataError(
                f"{name}: the answer has {len(answer):,} tokens, and the model reads {self.max_length:,}; leave the "
                "task out"
            )
        check_tokens(self.model, (*context, *answer), name)
        num_trimmed = max(0, len(context) - max_context_tokens)
        # lm_eval counts the characters of an answer itself.
        return Request(tuple(context[-max_context_tokens:]), tuple(answer), num_characters=0, num_trimmed=num_trimmed)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in nats.

        A text that is longer than the model reads is cut into the same windows as by lm_eval's own models: each token
        is predicted once, and the last window begins earlier to have full context. Collective. Raises DataError.
        """
        # Divide each text into windows.
        windows: list[Request] = []
        text_indices: list[int] = []  # for each window, the index of its text
        for text_index, request in enumerate(requests):
            (text,) = request.args
            tokens = self.tok_encode(text)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                context, predicted = make_disjoint_window(window)
                windows.append(self._fit(context, predicted, name_of(request)))
                text_indices.append(text_index)

        # The log-probability of a text is the sum over its windows. A text without tokens has none.
        nats_by_text = [0.0] * len(requests)
        if windows:
            scores = self._score(windows, disable_tqdm)
            for text_index, (nats, _) in zip(text_indices, scores, strict=True):
                nats_by_text[text_index] += nats
        return nats_by_text

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model generates greedily after each context.

        Collective. Raises DataError for settings that ask for samples, and for limits that leave no room.
        """
        prompts = [self._prompt(name_of(request), *request.args) for request in requests]
        with self._progress("generate_until", len(prompts), disable_tqdm) as update:
            return generate_answers(self.model, self.located.tokenizer, "lm_eval", prompts, self.data_rank, update)

    def _prompt(self, name: str, context: str, gen_kwargs: dict[str, Any]) -> Prompt:
        """Return the prompt of a request to generate, cut from the left so that the answer fits into the model.

        `name` is the request's, for errors, and `gen_kwargs` are lm_eval's settings of generation. Raises
        DataError.
        """
        settings: dict[str, Any] = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
        for key, value in settings.items():
            if key not in ACCEPTED_SETTINGS and value not in GREEDY.get(key, ()):
                raise DataError(
                    f"{name}: generation_kwargs has {key} {value!r}, and answers are written greedily, a token at a "
                    f"time; expected {', '.join((*ACCEPTED_SETTINGS, 'do_sample: false'))} alone"
                )

        max_new_tokens = settings["max_gen_toks"]
        max_context_tokens = self.max_length - max_new_tokens
        if max_context_tokens < 1 or max_new_tokens < 1:
            raise DataError(
                f"{name}: max_gen_toks is {max_new_tokens:,}, and the model reads {self.max_length:,} tokens, prompt "
                "included; set a smaller one: --gen_kwargs max_gen_toks=…"
            )
        # The model's own end of text always ends an answer. An empty stop would end it before it begins.
        stops = [stop for stop in handle_stop_sequences(settings.get("until"), eos=None) if stop]
        tokens = self.tok_encode(context)[-max_context_tokens:] or [self.prefix_token_id]
        return Prompt(tokens, max_new_tokens, stops)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Raise ConfigError, because lm_eval would render a chat template that a checkpoint does not have."""
        raise ConfigError("--apply_chat_template: checkpoints have no chat template; leave it out")

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Let lm_eval keep answers in a file. Raises ConfigError on several ranks."""
        if self.data_rank.num_ranks > 1:
            raise ConfigError(
                "--use_cache: ranks would differ in which requests are left; leave it out, or use one rank"
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval writes about the model into its results."""
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.model.model.parameters()),
            "model_dtype": str(next(self.model.model.parameters()).dtype),
            "model_revision": self.located.source,
            "model_sha": self.located.save_id or "",
        }

    @contextmanager
    def _progress(self, request_type: str, total: int, is_off: bool) -> Iterator[Callable[[int, int], Any]]:
        """Show a progress bar on rank 0. Yields a function that takes the number of finished items, and the total."""
        is_off = is_off or self.data_rank.rank > 0
        with tqdm(total=total, desc=f"Running {request_type} requests", disable=is_off) as bar:
            yield lambda num_done, _total: bar.update(num_done - bar.n)


def name_of(request: Any) -> str:
    """Name a request of lm_eval by its task and item, because the requests of all tasks come at once."""
    return f"lm_eval: {request.task_name}, item {request.doc_id}"


def _device_type(lm_eval_device: str | None, world_size: int) -> str:
    """Return `cuda` or `cpu`: this machine's accelerator if it has one, unless --device asks for the CPU.

    lm_eval's default is cuda:0, with or without a GPU. Raises ConfigError for any other device.
    """
    device_type = devices.device_type()
    if lm_eval_device in (None, "cuda", "cuda:0") or lm_eval_device == device_type:
        return device_type
    if lm_eval_device == "cpu" and world_size == 1:
        return "cpu"
    raise ConfigError(
        f"--device: {lm_eval_device} given, expected cpu, with one rank, or nothing; choose GPUs by "
        "CUDA_VISIBLE_DEVICES, and start a rank for each with composer -n"
    )


def _note(text: str) -> None:
    """Log a warning, on rank 0 alone."""
    if this_rank().rank == 0:
        logging.getLogger(__name__).warning(text)
