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
    """A question cannot be put to this model. The message is a short reason; skipped items are counted by it."""


class Encoding:
    """Turns prompts into token ids, by one convention ("separate" or "joint") and for one tokenizer.

    Tokens that the tokenizer puts before every text, such as <s>, stand at the beginning of the prompt and nowhere
    else. A prompt that is longer than the model's context loses its first tokens, including these.
    """

    def __init__(self, tokenizer: Tokenizer, config: TaskConfig, max_seq_len: int):
        """Take the convention, and whether to strip white space, from the task's `config`."""
        self.tokenizer = tokenizer
        self.strips_context = config.strip_dataset
        self.is_joint = config.tokenization == "joint"
        # The last token of an answer is predicted but never read, so lm_eval lets prompt and answer have one token more
        # than the context. LLM Foundry, which has the convention "separate", does not.
        self.max_tokens = max_seq_len + 1 if self.is_joint else max_seq_len
        # A tokenizer of byte-level BPE has one token for " a", and the space has to be given. SentencePiece adds it.
        self.needs_space = len(tokenizer.encode(" a")) == 1
        self._encode = functools.lru_cache(CACHED_TEXTS)(tokenizer.encode)

    def request(self, preamble: str, context: str, answer: str) -> Request:
        """Return the request for the probability of `answer` after `preamble` (the examples) and `context`.

        Raises UnusableItemError if the answer has no tokens of its own, or is longer than the model's context.
        """
        if self.is_joint:
            context_ids, answer_ids = self._encode_together(preamble, context, answer)
        else:
            context_ids = self._encode_apart(preamble, context)
            has_space = answer == "" or answer.startswith(" ")
            if self.needs_space and not has_space:
                answer_ids = self._encode(" " + answer)
            else:
                answer_ids = self._encode(answer)

        if not answer_ids and answer.strip():
            raise UnusableItemError(
                "an answer that shares its only token with the context (tokenization: separate keeps them apart)"
            )
        if not answer_ids:
            raise UnusableItemError("an answer without tokens")
        return self._fit(context_ids, answer_ids, num_answer_tokens=len(answer_ids), num_characters=len(answer))

    def prompt(self, preamble: str, context: str, max_new_tokens: int) -> Request:
        """Return the request to generate an answer of up to `max_new_tokens` tokens.

        Raises UnusableItemError if the model's context has no room for that many.
        """
        if self.is_joint:
            context_ids = self._encode_apart("", preamble + context)
        else:
            context_ids = self._encode_apart(preamble, context)
        return self._fit(context_ids, [], num_answer_tokens=max_new_tokens, num_characters=0)

    def _encode_together(self, preamble: str, context: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokenise context and answer as one text. Returns (tokens of the context, tokens of the answer).

        The text is divided as in lm-evaluation-harness. The context is tokenised alone, without the white space at its
        end, because tokenizers join a space to the following word. If it has n tokens then, the answer's tokens are
        those of the whole text from position n on. A token that spans the border may be missing from both parts.
        """
        context_alone = self._encode((preamble + context).rstrip())
        whole = self.tokenizer.encode(preamble + context + answer)
        return self.tokenizer.beginning + context_alone, whole[len(context_alone) :]

    def _encode_apart(self, preamble: str, context: str) -> list[int]:
        """Tokenise preamble and context separately, and return the tokens of both, one after the other."""
        if self.strips_context:
            context = context.rstrip()
        return self.tokenizer.beginning + self._encode(preamble) + self._encode(context)

    def _fit(
        self, context_ids: list[int], answer_ids: list[int], num_answer_tokens: int, num_characters: int
    ) -> Request:
        """Return the request, with the first tokens of the context left out if context and answer are too long.

        `num_answer_tokens` is the room that the answer needs; `answer_ids` is empty if it is generated. Raises
        UnusableItemError if no token of context fits beside the answer.
        """
        room = self.max_tokens - num_answer_tokens
        if room < 1:
            raise UnusableItemError("an answer longer than the model")
        if not context_ids:
            context_ids = [self.tokenizer.prefix_token_id]  # without a token to predict it from, it has no probability
        num_trimmed = max(0, len(context_ids) - room)
        return Request(tuple(context_ids[-room:]), tuple(answer_ids), num_characters, num_trimmed)


def limit_answer_tokens(config: TaskConfig, rows: list[Row], tokenizer: Tokenizer) -> int:
    """Return the number of tokens that a generated answer may have, counted as in LLM Foundry.

    That is the length of the longest solution in the file, with its reasoning, plus the tokens that the tokenizer puts
    before every text, plus THOUGHT_ALLOWANCE if the task has a delimiter between reasoning and answer.
    """
    solutions = [render_solution(config, row, answer) for row in rows for answer in accepted_answers(row)]
    longest = 0
    for start in range(0, len(solutions), TEXTS_AT_ONCE):
        token_ids = tokenizer.encode_batch(solutions[start : start + TEXTS_AT_ONCE])
        longest = max(longest, *map(len, token_ids))
    allowance = THOUGHT_ALLOWANCE if config.cot_delimiter else 0
    return len(tokenizer.beginning) + longest + allowance


def list_stop_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the tokens that end a generated answer, besides the end-of-text token."""
    others = sorted(tokenizer.stop_token_ids - {tokenizer.eos_token_id})
    return [tokenizer.decode([token]) for token in others if token < tokenizer.vocab_size]
