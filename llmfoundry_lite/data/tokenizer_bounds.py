"""Bounds on what a tokenizer of somebody else may make of a text: a file of a few bytes could make gigabytes of a line.

Each step of a tokenizer may replace a character by several: what its author chose is multiplied over all steps, and
may be at most MAX_LENGTHENING. What Unicode lays down (NFKD makes 18 characters of one at most) is not counted.
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
MAX_IDS = 1 << 22
"""Limit of ids, and number of tokens: the library writes, and transformers builds, a list up to the largest id. The
largest vocabularies known have a million."""


def check_bounds(backend: tokenizers.Tokenizer, name: str) -> None:
    """Raise DataError for a tokenizer that may make far more of a text than there is, or whose ids are too large."""
    if problem := next(_problems(backend), None):
        raise DataError(f"tokenizer {name}: {problem}; choose another tokenizer")


def is_panic(error: BaseException) -> bool:
    """Return whether the library's Rust code has panicked, for example because a regular expression takes too long. The
    class, which is no Exception, cannot be imported."""
    return type(error).__name__ == "PanicException"


def _problems(backend: tokenizers.Tokenizer) -> Iterator[str]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    yield from problems_of_ids(vocabulary.values())
    if vocabulary and (longest := max(map(len, vocabulary))) > MAX_TOKEN_CHARACTERS:
        yield f"a token has {longest:,} characters, expected at most {MAX_TOKEN_CHARACTERS:,}"

    for attribute in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(backend.model, attribute, None)
        if isinstance(affix, str) and len(affix) > MAX_AFFIX_CHARACTERS:
            yield f"its {attribute} has {len(affix):,} characters, expected at most {MAX_AFFIX_CHARACTERS}"
    num_characters = getattr(backend.model, "max_input_chars_per_word", None)
    if isinstance(num_characters, int) and num_characters > MAX_WORD_CHARACTERS:
        yield f"its max_input_chars_per_word is {num_characters:,}, expected at most {MAX_WORD_CHARACTERS:,}"

    encoding = [*_steps_of(backend.normalizer), *_steps_of(backend.pre_tokenizer)]
    for kind, steps in (("encoding", encoding), ("decoding", [*_steps_of(backend.decoder)])):
        lengthening = math.prod(map(_lengthening_of, steps))
        num_byte_levels = sum(step["type"] == "ByteLevel" for step in steps)
        lengthening *= 2 ** max(0, num_byte_levels - 1)  # the first makes characters of bytes, which is usual
        if lengthening > MAX_LENGTHENING:
            yield (
                f"its steps of {kind} may make {min(lengthening, 1e18):,.0f} characters of one, expected at most "
                f"{MAX_LENGTHENING}"
            )
    yield from _problems_of_templates([*_steps_of(backend.post_processor)])


def problems_of_ids(ids: Iterable[int]) -> Iterator[str]:
    """Yield what is wrong with the ids of a vocabulary."""
    ids = list(ids)
    room = max(len(ids), max(ids, default=0) + 1)
    if room > MAX_IDS:
        yield f"its tokens need {room:,} ids, expected at most {MAX_IDS:,}"


def _steps_of(component: Any) -> Iterator[dict[str, Any]]:
    """Yield each step of a component, without the sequences that they stand in."""
    if component is not None:
        yield from _flatten(json.loads(component.__getstate__()))


def _flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for steps in step.values():
        for each in steps if isinstance(steps, list) else ():
            yield from _flatten(each)


def _lengthening_of(step: dict[str, Any]) -> float:
    """Return the most characters that a step makes of one by its author's choice; at least 1."""
    kind = step["type"]
    if kind == "Replace":
        pattern, content = step["pattern"], _num_characters(step["content"])
        if pattern.get("String"):
            return max(1.0, content / len(pattern["String"]))
        return 1.0 + content  # a regular expression may match nothing between two characters
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
    """Return the characters of the longest text in a map of SentencePiece: the size of its index, the index, and texts
    that each end with a zero."""
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return max(len(text.decode(errors="replace")) for text in charsmap[start:].split(b"\0"))


def _problems_of_templates(steps: list[dict[str, Any]]) -> Iterator[str]:
    num_ids, num_copies = 0, 1
    for step in steps:
        if step["type"] != "TemplateProcessing":
            continue
        of_token = {key: len(token["ids"]) for key, token in step["special_tokens"].items()}
        for pieces in (step["single"], step["pair"]):
            names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            num_ids += sum(of_token.get(name, 0) for name in names)
        num_copies *= max(1, sum("Sequence" in piece for piece in step["single"]))
    if num_ids > MAX_TEMPLATE_IDS or num_copies > 1:
        yield (
            f"its post-processor adds {num_ids:,} ids to a text that it repeats {num_copies:,} times, expected at most "
            f"{MAX_TEMPLATE_IDS} ids and no repetition"
        )
