"""Our model behind the three questions of lm-evaluation-harness: `python -m llmfoundry_formats.lm_eval`.

Prompts, examples, metrics and files are lm_eval's; log-probabilities and answers are ours. Several ranks divide the
requests of each task, and give the same results as one.
"""

# pyright: reportMissingImports=false

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
"""Generation settings that change nothing at these values. `top_k` and `top_p` are for sampling alone."""
WITHOUT_EFFECT = ("until", "max_gen_toks", "top_k", "top_p")
TIMEOUT_SECONDS = 600.0


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
    """Not the user's to give: set to one of the three above, because lm_eval names its output folder after it."""
    tokenizer: str | None = None
    """Default: the model's own."""
    precision: str = setting("fp32", choices="fp32 tf32 bf16 fp16")
    max_seq_len: int | None = setting(None, POSITIVE)
    """Default: the model's."""
    max_gen_toks: int = setting(256, POSITIVE)
    """Tokens that an answer may have where its task does not say."""
    device_batch_tokens: int | None = setting(None, POSITIVE)
    """Tokens in one forward pass; --batch_size is not used. Default: 2,048 on a CPU, 32,768 on an accelerator."""

    @property
    def where(self) -> str:
        named = {"run": self.run, "checkpoint": self.checkpoint, "hf": self.hf}
        given = {key: value for key, value in named.items() if value is not None}
        if len(given) != 1:
            raise ConfigError(
                f"model_args: {' and '.join(given) or 'no model'} given, expected one of run=RUN, checkpoint=PATH, "
                "hf=FOLDER_OR_NAME"
            )
        ((key, value),) = given.items()
        return f"hf:{value}" if key == "hf" else str(value)


class CheckpointLM(TemplateLM):
    """Our model behind lm_eval's three questions. lm_eval divides context and answer, as it does for `--model hf`.

    All ranks get all requests and answer the same, so lm_eval sees one rank. It writes where LOCAL_RANK is 0.
    """

    def __init__(self, *, device: str | None = None, batch_size: Any = None, max_batch_size: Any = None, **given: Any):
        """Raises UserError for arguments that are unknown, and where `locate_and_load_model` does."""
        super().__init__()
        names = ("run", "checkpoint", "hf", "tokenizer")  # lm_eval reads run=7 as a number
        given = {key: str(value) if key in names else value for key, value in given.items()}
        arguments: ModelArguments = build_block(ModelArguments, given, "model_args")
        where, here = arguments.where, this_rank()
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            _note("--batch_size is not used: requests are packed by tokens; set --model_args device_batch_tokens=…")
        devices.set_tf32(arguments.precision == "tf32")
        self._device = choose_device(_device_type(device, here.world_size))
        if here.world_size > 1:
            start_process_group(devices.device_type(), TIMEOUT_SECONDS)
            os.environ["LOCAL_RANK"] = str(here.rank)  # lm_eval writes where this is 0; one rank of all nodes must
        self.data_rank = DataRank(here.rank, here.world_size)
        with user_errors_on_all_ranks():
            located = locate_and_load_model(
                where, tokenizer=arguments.tokenizer, precision=arguments.precision, device=self._device
            )
        for note in located.notes:
            _note(f"{note}; {located.source} is evaluated")
        self.located, self.model = located, located.model
        self.max_length = min(arguments.max_seq_len or self.model.max_seq_len, self.model.max_seq_len)
        self.max_gen_toks = arguments.max_gen_toks
        self.batch_tokens = arguments.device_batch_tokens or BATCH_TOKENS[self._device.type]
        self._encode = lru_cache(4096)(located.tokenizer.encode)  # the choices of an item share their context
        self._beginning = located.tokenizer.beginning
        self._asked: Any = []
        """lm_eval's requests, in the order in which `_loglikelihood_tokens` gets their tokens."""

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        model = super().create_from_arg_obj(arg_dict, additional_config)
        # lm_eval names the folder of its logs after pretrained=, model= or path=, and at random without them.
        arg_dict.setdefault("path", next(arg_dict[key] for key in ("run", "checkpoint", "hf") if key in arg_dict))
        return model

    @property
    def eot_token_id(self) -> int:
        return self.located.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.located.tokenizer.prefix_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids, after those that the tokenizer begins with. Special tokens spelled in the text are text."""
        return [*(self._beginning if add_special_tokens is not False else []), *self._encode(string)]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (nats, whether every token is the likeliest) of each request's answer. Raises DataError."""
        self._asked = requests
        for request in requests:
            if not "".join(request.args):
                raise DataError(f"{name_of(request)} has no text at all; leave the task out, or repair the item")
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return (nats, whether every token is the likeliest) of each (texts, context, answer), in order."""
        named = zip(self._asked, requests, strict=True)
        asked = [self._fit(context, answer, name_of(request)) for request, (_, context, answer) in named]
        if num_cut := sum(request.num_trimmed > 0 for request in asked):
            _note(f"{num_cut:,} of {len(asked):,} contexts are cut from the left to fit {self.max_length:,} tokens")
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, request in enumerate(asked):
            groups.setdefault(request.context, []).append(number)
        packed = [[asked[number] for number in group] for group in groups.values()]
        with self._progress("loglikelihood", len(groups), disable_tqdm) as move:
            scores = score_all(self.model, "lm_eval", packed, self.batch_tokens, self.data_rank, move)
        order = [number for group in groups.values() for number in group]
        found = dict(zip(order, scores, strict=True))
        return [(found[number].log_probability, found[number].is_greedy) for number in range(len(asked))]

    def _fit(self, context: Sequence[int], answer: Sequence[int], name: str) -> Request:
        context = context or [self.prefix_token_id]  # lm_eval counts a context of spaces alone as part of the answer
        room = self.max_length + 1 - len(answer)  # the last token is predicted and never read
        if not answer:
            raise DataError(
                f"{name}: the answer has no token of its own: it is empty, or shares its only token with the context; "
                "leave the task out, or begin the answer with a space"
            )
        if room < 1:
            raise DataError(
                f"{name}: the answer has {len(answer):,} tokens, and the model reads {self.max_length:,}; leave the "
                "task out"
            )
        check_tokens(self.model, (*context, *answer), name)
        return Request(tuple(context[-room:]), tuple(answer), 0, max(0, len(context) - room))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability (nats) of each text, in windows as lm_eval's own models have them."""
        windows, owners, self._asked = [], [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
                self._asked.append(requests[owner])
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm) if windows else []
        for owner, (nats, _) in zip(owners, scores, strict=True):
            sums[owner] += nats
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes greedily after each context. Raises DataError for settings that sample."""
        prompts = [self._prompt(name_of(request), *request.args) for request in requests]
        with self._progress("generate_until", len(prompts), disable_tqdm) as move:
            return generate_answers(self.model, self.located.tokenizer, "lm_eval", prompts, self.data_rank, move)

    def _prompt(self, name: str, context: str, given: dict[str, Any]) -> Prompt:
        settings: dict[str, Any] = normalize_gen_kwargs(given, self.max_gen_toks)
        for key, value in settings.items():
            if key not in WITHOUT_EFFECT and value not in GREEDY.get(key, ()):
                raise DataError(
                    f"{name}: generation_kwargs has {key} {value!r}, and answers are written greedily, a token at a "
                    f"time; expected {', '.join((*WITHOUT_EFFECT, 'do_sample: false'))} alone"
                )
        num_tokens = settings["max_gen_toks"]
        room = self.max_length - num_tokens
        if room < 1 or num_tokens < 1:
            raise DataError(
                f"{name}: max_gen_toks is {num_tokens:,}, and the model reads {self.max_length:,} tokens, prompt "
                "included; set a smaller one: --gen_kwargs max_gen_toks=…"
            )
        stops = [stop for stop in handle_stop_sequences(settings.get("until"), eos=None) if stop]
        tokens = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        return Prompt(tokens, num_tokens, stops)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise ConfigError("--apply_chat_template: checkpoints have no chat template; leave it out")

    def set_cache_hook(self, cache_hook: Any) -> None:
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
    def _progress(self, what: str, total: int, is_off: bool) -> Iterator[Callable[[int, int], Any]]:
        with tqdm(total=total, desc=f"Running {what} requests", disable=is_off or self.data_rank.rank > 0) as bar:
            yield lambda done, _: bar.update(done - bar.n)


def name_of(request: Any) -> str:
    """Name a request of lm_eval by its task and item, because the requests of all tasks come at once."""
    return f"lm_eval: {request.task_name}, item {request.doc_id}"


def _device_type(asked: str | None, world_size: int) -> str:
    """Return `cuda` or `cpu`; lm_eval's default is cuda:0, with or without a GPU. Raises ConfigError."""
    found = devices.device_type()
    if asked in (None, "cuda", "cuda:0") or asked == found:
        return found
    if asked == "cpu" and world_size == 1:
        return "cpu"
    raise ConfigError(
        f"--device: {asked} given, expected cpu, with one rank, or nothing; choose GPUs by CUDA_VISIBLE_DEVICES, and "
        "start a rank for each with composer -n"
    )


def _note(text: str) -> None:
    if this_rank().rank == 0:
        logging.getLogger(__name__).warning(text)
