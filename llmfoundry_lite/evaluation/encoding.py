"""Turns the texts of a prompt into the token ids of a request.

Two conventions exist, and they give different scores. LLM Foundry tokenises examples, context and answer apart
(`separate`). lm-evaluation-harness tokenises all of it together and then divides the tokens (`joint`).
"""

import functools

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.evaluation.items import Request
from llmfoundry_lite.evaluation.prompts import accepted_answers, render_solution
from llmfoundry_lite.evaluation.task_files import Row

THOUGHT_ALLOWANCE = 10
"""Tokens by which a model's reasoning may exceed the longest in the file, as in LLM Foundry."""
TEXTS_AT_ONCE = 4096
"""Texts that are tokenised together, on all cores. One after the other, those of a large task take ten seconds."""
CACHED_TEXTS = 4096
"""Encoded texts that are kept, because the options of an item and the items of a task share contexts and examples."""


class UnusableItemError(Exception):
    """An item cannot be asked. The message is the reason, by which skipped items are counted."""


class Encoding:
    """Encodes prompts by one convention, for one tokenizer and length of a model.

    The tokens that the tokenizer begins with stand before the first text and nowhere else. A prompt that is too long
    loses its first tokens, these included.
    """

    def __init__(self, tokenizer: Tokenizer, config: TaskConfig, max_seq_len: int):
        """`config` says by which convention texts are tokenised, and whether white space is stripped from them."""
        self.tokenizer = tokenizer
        self.strips_context = config.strip_dataset
        self.is_joint = config.tokenization == "joint"
        # An answer's last token is predicted and never read, so one more token fits. LLM Foundry does not use that.
        self.max_tokens = max_seq_len + 1 if self.is_joint else max_seq_len
        # Byte-level BPE has one token for " a". SentencePiece adds the space by itself.
        self.needs_space = len(tokenizer.encode(" a")) == 1
        self._encode = functools.lru_cache(CACHED_TEXTS)(tokenizer.encode)

    def request(self, preamble: str, context: str, answer: str) -> Request:
        """Return the request for an answer's probability after a preamble (the examples) and a context.

        Raises UnusableItemError for an answer without tokens, or one that is longer than the model.
        """
        if self.is_joint:
            context_ids, answer_ids = self._encode_together(preamble, context, answer)
        else:
            context_ids = self._encode_apart(preamble, context)
            begins_with_space = answer.startswith(" ")
            space = " " if self.needs_space and answer and not begins_with_space else ""
            answer_ids = self._encode(space + answer)

        if not answer_ids and answer.strip():
            raise UnusableItemError(
                "an answer that one token joins to its context (tokenization: separate has it apart)"
            )
        if not answer_ids:
            raise UnusableItemError("an answer without tokens")
        return self._fit(context_ids, answer_ids, num_answer_tokens=len(answer_ids), num_characters=len(answer))

    def prompt(self, preamble: str, context: str, max_new_tokens: int) -> Request:
        """Return the request for an answer of up to `max_new_tokens` tokens that the model writes itself.

        Raises UnusableItemError if the model has no room for it.
        """
        if self.is_joint:
            context_ids = self._encode_apart("", preamble + context)
        else:
            context_ids = self._encode_apart(preamble, context)
        return self._fit(context_ids, [], num_answer_tokens=max_new_tokens, num_characters=0)

    def _encode_together(self, preamble: str, context: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokenise context and answer together. Returns the tokens of each, divided as lm-evaluation-harness does.

        The context's tokens are those that it has alone, without the white space at its end, which tokenizers like to
        have at the beginning of the next word. Of the whole text's tokens, those beyond that length are the answer's.
        So what the answer's first token would take from the context stays with the context.
        """
        context_alone = self._encode((preamble + context).rstrip())
        whole = self.tokenizer.encode(preamble + context + answer)
        return self.tokenizer.beginning + context_alone, whole[len(context_alone) :]

    def _encode_apart(self, preamble: str, context: str) -> list[int]:
        """Tokenise preamble and context each by itself."""
        if self.strips_context:
            context = context.rstrip()
        return self.tokenizer.beginning + self._encode(preamble) + self._encode(context)

    def _fit(
        self, context_ids: list[int], answer_ids: list[int], num_answer_tokens: int, num_characters: int
    ) -> Request:
        """Cut the context's first tokens off, so that the answer has room."""
        room = self.max_tokens - num_answer_tokens
        if room < 1:
            raise UnusableItemError("an answer longer than the model")
        if not context_ids:
            context_ids = [self.tokenizer.prefix_token_id]  # the answer's first token needs one before it
        num_trimmed = max(0, len(context_ids) - room)
        return Request(tuple(context_ids[-room:]), tuple(answer_ids), num_characters, num_trimmed)


def count_answer_tokens(config: TaskConfig, rows: list[Row], tokenizer: Tokenizer) -> int:
    """Return how many tokens a model may use for its answer, counted as in LLM Foundry.

    It is the longest solution in the file, with its reasoning and with the tokens that the tokenizer begins with.
    """
    solutions = [render_solution(config, row, answer) for row in rows for answer in accepted_answers(row)]
    longest = 0
    for start in range(0, len(solutions), TEXTS_AT_ONCE):
        token_ids = tokenizer.encode_batch(solutions[start : start + TEXTS_AT_ONCE])
        longest = max(longest, *map(len, token_ids))
    allowance = THOUGHT_ALLOWANCE if config.cot_delimiter else 0
    return len(tokenizer.beginning) + longest + allowance


def list_stop_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the tokens, besides the end of text, that end an answer."""
    others = sorted(tokenizer.stop_token_ids - {tokenizer.eos_token_id})
    return [tokenizer.decode([token]) for token in others if token < tokenizer.vocab_size]
