"""Texts of tokens, so that a person can see a prompt as the model got it, with the borders between its tokens.

`TokenTexts` turns token ids into the text of each token, and `prompt_tokens` does so for all options of an item. An
evaluation records the result with `keep_prompts=true`, and `eval --show` prints it.
"""

from collections.abc import Sequence

from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.evaluation.items import Item
from llmfoundry_lite.evaluation.records import Record

INCOMPLETE = "\ufffd"
"""The replacement character, which a decoder returns for bytes that are not a whole character."""
MAX_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8, and so the most tokens that it may be divided into."""


class TokenTexts:
    """Returns the text of each token, for one tokenizer. Results are cached by id."""

    def __init__(self, tokenizer: Tokenizer):
        """Take the tokenizer that the ids are of."""
        self._tokenizer = tokenizer
        # Decoders such as SentencePiece's leave out the space before the first token. So each token is decoded after
        # another one, whose text is then removed.
        self._anchor_ids = tokenizer.encode("a")[-1:]
        self._anchor_text = tokenizer.decode(self._anchor_ids)
        self._text_of_ids: dict[tuple[int, ...], str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, including the names of special tokens.

        A character that several tokens make up is the text of the last of them, and the others have an empty text:

            [" ", "caf", "", "é"]   if "é" has two tokens, one for each of its bytes
        """
        texts: list[str] = []
        pending_ids: list[int] = []
        """Tokens that may be the first bytes of a character."""
        for token_id in ids:
            pending_ids.append(token_id)
            text = self._decode(tuple(pending_ids))
            may_be_incomplete = text.endswith(INCOMPLETE) and len(pending_ids) < MAX_CHARACTER_BYTES
            if may_be_incomplete:
                texts.append("")
                continue
            texts.append(text)
            pending_ids.clear()

        if pending_ids:  # the last character is not complete
            texts[-1] = self._decode(tuple(pending_ids))
        return texts

    def _decode(self, ids: tuple[int, ...]) -> str:
        """Return the text of tokens that stand within a text."""
        text = self._text_of_ids.get(ids)
        if text is None:
            text = self._tokenizer.decode([*self._anchor_ids, *ids]).removeprefix(self._anchor_text)
            self._text_of_ids[ids] = text
        return text


def prompt_tokens(item: Item, token_texts: TokenTexts) -> Record:
    """Return the prompt of an item as the model got it, as lists of token texts.

    - `shared` is the beginning of the context that all options have in common.
    - `contexts` has the rest of the context of each option. It is empty for options that differ only in their answers.
    - `answers` has the answer of each option, whose log-probability is computed. It is empty if it is generated.

    For a question with two choices, the record may be

        {"shared": ["The", " sky", " is"], "contexts": [[], []], "answers": [[" blue"], [" gre", "en"]]}
    """
    contexts = [request.context for request in item.requests]
    num_shared = _length_of_common_prefix(contexts)
    return {
        "shared": token_texts.of(contexts[0][:num_shared]),
        "contexts": [token_texts.of(context[num_shared:]) for context in contexts],
        "answers": [token_texts.of(request.continuation) for request in item.requests],
    }


def _length_of_common_prefix(contexts: Sequence[Sequence[int]]) -> int:
    """Return the number of token ids at the beginning that are the same in all contexts."""
    length = 0
    for ids_at_position in zip(*contexts, strict=False):  # ends with the shortest context
        if len(set(ids_at_position)) > 1:
            break
        length += 1
    return length
