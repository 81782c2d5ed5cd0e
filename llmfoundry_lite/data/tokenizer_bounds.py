"""Bounds on what a tokenizer of somebody else may make of a text: a file of a few bytes could make gigabytes of a line.

Each step of a tokenizer may replace a character by several: what its author chose is multiplied over all steps, and
may be at most MAX_LENGTHENING. What Unicode lays down (NFKD makes 18 characters of one at most) is not counted.

A tokenizer has these parts, each of which may be a sequence of steps: the normalizer changes a text, the pre-tokenizer
splits it, the model finds tokens, the post-processor adds some, and the decoder makes text of tokens. `check_bounds`
asks for the first problem of any part. Steps are read as the library's own JSON describes them.
"""

import base64
import json
import math
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

from llmfoundry_lite.errors import DataError

MAX_LENGTHENING = 16
"""Characters that the author's own steps may make of one. Of known tokenizers none makes more than 4."""
MAX_UNICODE_LENGTHENING = 18
"""Characters that NFKC and NFKD make of one at most (U+FDFA)."""
MAX_TEMPLATE_IDS = 64
"""Ids that a post-processor may add to a text. Those of known tokenizers add up to 3."""
MAX_AFFIX_CHARACTERS = 64
"""Characters of a prefix or suffix that a model adds to parts of words."""
MAX_WORD_CHARACTERS = 1000
"""Characters of a word up to which WordPiece looks for parts, which takes the cube of them; usual are 100."""
MAX_TOKEN_CHARACTERS = 1 << 14
"""Characters of a token: an answer of some hundred tokens stays small."""
MAX_SHOWN_LENGTHENING = 1e18
"""Largest number in an error, since a product over many steps may have hundreds of digits, or be infinite."""
MAX_IDS = 1 << 22
"""Limit of ids, and number of tokens: the library writes, and transformers builds, a list up to the largest id. The
largest vocabularies known have a million."""


def check_bounds(backend: tokenizers.Tokenizer, name: str) -> None:
    """Raise DataError for a tokenizer that may make far more of a text than there is, or whose ids are too large."""
    for problem in _problems(backend):
        raise DataError(f"tokenizer {name}: {problem}; choose another tokenizer")


def is_panic(error: BaseException) -> bool:
    """Return whether the library's Rust code has panicked, for example because a regular expression takes too long.

    The class is no Exception, and it cannot be imported, so its name is compared.
    """
    return type(error).__name__ == "PanicException"


def _problems(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield what is wrong with a tokenizer, in clauses that begin with "its" or "a"."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    yield from problems_of_ids(vocabulary.values())
    longest = max(map(len, vocabulary), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        yield f"a token has {longest:,} characters, expected at most {MAX_TOKEN_CHARACTERS:,}"
    yield from _problems_of_model(backend.model)

    encoding_steps = _steps_of(backend.normalizer) + _steps_of(backend.pre_tokenizer)
    yield from _problems_of_lengthening("encoding", encoding_steps)
    yield from _problems_of_lengthening("decoding", _steps_of(backend.decoder))
    yield from _problems_of_templates(_steps_of(backend.post_processor))


def problems_of_ids(ids: Iterable[int]) -> Iterator[str]:
    """Yield what is wrong with the ids of a vocabulary."""
    ids = list(ids)
    num_ids_needed = max(len(ids), max(ids, default=0) + 1)
    if num_ids_needed > MAX_IDS:
        yield f"its tokens need {num_ids_needed:,} ids, expected at most {MAX_IDS:,}"


def _problems_of_model(model: Any) -> Iterator[str]:
    """Yield what is wrong with the settings of a model. Each kind of model has some of them."""
    for attribute in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, attribute, None)
        if isinstance(affix, str) and len(affix) > MAX_AFFIX_CHARACTERS:
            yield f"its {attribute} has {len(affix):,} characters, expected at most {MAX_AFFIX_CHARACTERS}"
    num_characters = getattr(model, "max_input_chars_per_word", None)
    if isinstance(num_characters, int) and num_characters > MAX_WORD_CHARACTERS:
        yield f"its max_input_chars_per_word is {num_characters:,}, expected at most {MAX_WORD_CHARACTERS:,}"


def _problems_of_lengthening(task: str, steps: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a problem if the steps of `task`, encoding or decoding, may make too many characters of one."""
    lengthening = math.prod(map(_lengthening_of, steps))
    num_byte_levels = sum(step["type"] == "ByteLevel" for step in steps)
    # A ByteLevel step makes characters of bytes. The first one is usual; any further one doubles what is not ASCII.
    lengthening *= 2 ** max(0, num_byte_levels - 1)
    if lengthening > MAX_LENGTHENING:
        yield (
            f"its steps of {task} may make {min(lengthening, MAX_SHOWN_LENGTHENING):,.0f} characters of one, expected "
            f"at most {MAX_LENGTHENING}"
        )


def _steps_of(component: Any) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, without the sequences that they stand in; none for no part."""
    if component is None:
        return []
    return list(_flatten(json.loads(component.__getstate__())))


def _flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a step, or those in a sequence. The key of its list differs: `normalizers`, `decoders` and so on."""
    if step["type"] != "Sequence":
        yield step
        return
    for value in step.values():
        if isinstance(value, list):
            for inner_step in value:
                yield from _flatten(inner_step)


def _lengthening_of(step: dict[str, Any]) -> float:
    """Return the most characters that a step makes of one by its author's choice; at least 1."""
    kind = step["type"]
    if kind == "Replace":
        num_characters = _num_characters(step["content"])
        replaced_text = step["pattern"].get("String")
        if replaced_text:
            return max(1.0, num_characters / len(replaced_text))
        return 1.0 + num_characters  # a regular expression may match nothing between two characters
    if kind == "Prepend":  # a part between two special tokens has one character at least
        return 1.0 + _num_characters(step["prepend"])
    if kind == "Precompiled":
        longest = _longest_of_charsmap(base64.b64decode(step["precompiled_charsmap"] or ""))
        return max(1.0, longest / MAX_UNICODE_LENGTHENING)
    adds_a_space = step.get("prepend_scheme", "never") != "never" or bool(step.get("add_prefix_space"))
    return 2.0 if adds_a_space else 1.0


def _num_characters(text: str) -> int:
    """Count characters of a text after a later step has decomposed it."""
    return max(len(text), len(unicodedata.normalize("NFKD", text)))


def _longest_of_charsmap(charsmap: bytes) -> int:
    """Return the characters of the longest text in a map of SentencePiece.

    The map has the size of its index in four bytes, the index, and then texts that each end with a zero.
    """
    start_of_texts = 4 + int.from_bytes(charsmap[:4], "little")
    texts = charsmap[start_of_texts:].split(b"\0")
    return max(len(text.decode(errors="replace")) for text in texts)


def _problems_of_templates(steps: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a problem if a post-processor adds too many ids to a text, or repeats the text."""
    num_added_ids = 0
    num_repetitions = 1
    for step in steps:
        if step["type"] != "TemplateProcessing":
            continue
        ids_of_token = {key: len(token["ids"]) for key, token in step["special_tokens"].items()}
        for piece in (*step["single"], *step["pair"]):  # templates of one text, and of two
            if "SpecialToken" in piece:
                num_added_ids += ids_of_token.get(piece["SpecialToken"]["id"], 0)
        num_repetitions *= max(1, sum("Sequence" in piece for piece in step["single"]))
    if num_added_ids > MAX_TEMPLATE_IDS or num_repetitions > 1:
        yield (
            f"its post-processor adds {num_added_ids:,} ids to a text that it repeats {num_repetitions:,} times, "
            f"expected at most {MAX_TEMPLATE_IDS} ids and no repetition"
        )
