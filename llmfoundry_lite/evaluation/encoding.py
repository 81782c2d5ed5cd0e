"""Turns the texts of a prompt into the token ids of a request.

Two conventions exist, and they give different scores. LLM Foundry tokenises examples, context and answer apart
("separate"). lm-evaluation-harness tokenises all of it together and then divides the tokens ("joint"). The difference
shows where a token could span the border: for the context "un" and the answer "happy", "separate" has the tokens of
"un" and of " happy", and "joint" has those of "unhappy".

`prompts.py` renders the texts, and `tasks.py` calls this file for every row of a task.
"""

import functools

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.evaluation.items import Request
from llmfoundry_lite.evaluation.prompts import render_solution
from llmfoundry_lite.evaluation.questions import read_question
from llmfoundry_lite.evaluation.task_files import Row

THOUGHT_ALLOWANCE = 10
"""Tokens by which a model's reasoning may exceed the longest in the file, as in LLM Foundry."""
TEXTS_AT_ONCE = 4096
"""Number of texts that are tokenised in one call, on all cores. One at a time, a large task takes ten seconds."""
CACHED_TEXTS = 4096
"""Number of texts whose tokens are cached, because the options of an item and the items of a task share contexts and
examples."""


class UnusableItemError(Exception):
    """This model cannot be asked a question. The message is a short reason, by which skipped items are counted."""


class Encoding:
    """Turns prompts into token ids, by one convention ("separate" or "joint") and for one tokenizer.

    Tokens that the tokenizer puts before every text, such as <s>, stand at the beginning of the prompt and nowhere
    else. A prompt that is longer than the model's context loses its first tokens, including these.

    `request` scores a given answer, and `prompt` has the model generate one.
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
        """Return the request for the log-probability of an answer after a prompt.

        preamble: the text before the question, which is the prompt string and the few-shot examples.
        context: the text of the question, as `prompts.render_context` returns it.
        answer: the text whose tokens are scored.

        For example, if each word is a token that includes the space before it, then the preamble "Sea is blue", the
        context "\\nSky is " and the answer "blue" become, with the convention "separate",

            context        ["Sea", " is", " blue", "\\n", "Sky", " is"]
            continuation   [" blue"]

        Raises UnusableItemError if the answer has no tokens of its own, or is longer than the model's context.
        """
        if self.is_joint:
            context_ids, answer_ids = self._encode_together(preamble, context, answer)
            scored_text = _trailing_white_space(preamble + context) + answer
        else:
            context_ids = self._encode_apart(preamble, context)
            # The space that usually separates context and answer belongs to the first token of the answer.
            has_space = answer == "" or answer.startswith(" ")
            scored_text = answer if has_space else " " + answer
            answer_ids = self._encode(scored_text if self.needs_space else answer)

        # An answer without tokens would have probability 1. One with text got there because a token spans the border.
        if not answer_ids and answer.strip():
            raise UnusableItemError(
                "an answer that shares its only token with the context (tokenization: separate keeps them apart)"
            )
        if not answer_ids:
            raise UnusableItemError("an answer without tokens")
        request = self._fit(context_ids, answer_ids, num_answer_tokens=len(answer_ids), num_characters=len(answer))
        # The space counts for every tokenizer, also for one that adds it itself, so that all divide by the same bytes.
        return request._replace(num_bytes=len(scored_text.encode()))

    def prompt(self, preamble: str, context: str, max_new_tokens: int) -> Request:
        """Return the request to generate an answer of up to `max_new_tokens` tokens after a prompt.

        `preamble` is the text before the question, and `context` the question, as in `request`. The continuation of the
        request is empty. Raises UnusableItemError if the model's context has no room for that many tokens.
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
        those of the whole text from position n on. For the context "Sky is " and the answer "blue":

            context alone   ["Sky", " is"]             n = 2
            whole text      ["Sky", " is", " blue"]    the answer is [" blue"]

        A token that spans the border may be missing from both parts: "un" has one token, and if "unhappy" is one token
        as well, the answer "happy" has none.
        """
        context_alone_ids = self._encode((preamble + context).rstrip())
        whole_ids = self.tokenizer.encode(preamble + context + answer)
        return self.tokenizer.beginning + context_alone_ids, whole_ids[len(context_alone_ids) :]

    def _encode_apart(self, preamble: str, context: str) -> list[int]:
        """Tokenise preamble and context separately, and return the tokens of both, one after the other.

        With `strip_dataset`, white space at the end of the context is left out; the answer has the space then.
        """
        if self.strips_context:
            context = context.rstrip()
        return self.tokenizer.beginning + self._encode(preamble) + self._encode(context)

    def _fit(
        self, context_ids: list[int], answer_ids: list[int], num_answer_tokens: int, num_characters: int
    ) -> Request:
        """Return the request, with the first tokens of the context left out if context and answer are too long.

        `num_answer_tokens` is the room that the answer needs, and `answer_ids` is empty if the answer is generated. For
        example, if prompt and answer may have 8 tokens (`max_tokens`), only the last 6 of 10 context tokens fit beside
        2 answer tokens, and the request records 4 trimmed tokens.

        Raises UnusableItemError if not even one token of context fits beside the answer.
        """
        num_context_tokens_that_fit = self.max_tokens - num_answer_tokens
        if num_context_tokens_that_fit < 1:
            raise UnusableItemError("an answer longer than the model")

        # The answer's first token needs a token before it, from which it is predicted.
        if not context_ids:
            context_ids = [self.tokenizer.prefix_token_id]

        # The end of the context has the question, so the beginning goes.
        num_trimmed = max(0, len(context_ids) - num_context_tokens_that_fit)
        kept_context_ids = context_ids[-num_context_tokens_that_fit:]
        return Request(tuple(kept_context_ids), tuple(answer_ids), num_characters, num_trimmed)


def _trailing_white_space(text: str) -> str:
    """Return the white space at the end of a text: " " for "The sky is "."""
    return text[len(text.rstrip()) :]


def limit_answer_tokens(config: TaskConfig, rows: list[Row], tokenizer: Tokenizer) -> int:
    """Return the largest number of tokens that a generated answer may have, counted as in LLM Foundry.

    This is the default of the task's setting `max_new_tokens`: the length of the longest solution in the file, with its
    reasoning, plus the tokens that the tokenizer puts before every text, plus THOUGHT_ALLOWANCE if the task has a
    delimiter between reasoning and answer.
    """
    # Every accepted answer of every row counts.
    solutions: list[str] = []
    for row in rows:
        question = read_question(config, row)
        solutions += [render_solution(question, answer) for answer in question.answers]

    longest_solution_tokens = 0
    for start in range(0, len(solutions), TEXTS_AT_ONCE):
        ids_of_solutions = tokenizer.encode_batch(solutions[start : start + TEXTS_AT_ONCE])
        longest_solution_tokens = max(longest_solution_tokens, *map(len, ids_of_solutions))

    allowance = THOUGHT_ALLOWANCE if config.cot_delimiter else 0
    return len(tokenizer.beginning) + longest_solution_tokens + allowance


def list_stop_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the tokens that end a generated answer, besides the end-of-text token."""
    other_stop_ids = sorted(tokenizer.stop_token_ids - {tokenizer.eos_token_id})
    return [tokenizer.decode([token_id]) for token_id in other_stop_ids if token_id < tokenizer.vocab_size]
