"""Bounds on how much longer a tokenizer may make a text. An untrusted file of a few bytes could make it gigabytes long.

Each step of a tokenizer may replace a character by several. These factors, as far as the author of the tokenizer has
chosen them, are multiplied over all steps, and the product may be at most MAX_LENGTHENING. Factors that Unicode defines
(NFKD replaces a character by at most 18) are not counted.

A tokenizer has these parts, each of which may be a sequence of steps: the normalizer changes a text, the pre-tokenizer
splits it, the model finds tokens, the post-processor adds some, and the decoder converts tokens to text. `check_bounds`
checks all parts. Steps are read from the JSON in which the library describes them.
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
"""Characters by which the author's own steps may replace one. No known tokenizer has more than 4."""
MAX_UNICODE_LENGTHENING = 18
"""Most characters by which NFKC and NFKD replace one (U+FDFA)."""
MAX_TEMPLATE_IDS = 64
"""Ids that a post-processor may add to a text. Known tokenizers add up to 3."""
MAX_AFFIX_CHARACTERS = 64
"""Characters of a prefix or suffix that a model adds to parts of words."""
MAX_WORD_CHARACTERS = 1000
"""Length of words up to which WordPiece may search for parts, which takes time cubic in the length. 100 is usual."""
MAX_TOKEN_CHARACTERS = 1 << 14
"""Characters of a token, so that an answer of some hundred tokens stays small."""
MAX_SHOWN_LENGTHENING = 1e18
"""Largest number in an error, since a product over many steps may have hundreds of digits, or be infinite."""
MAX_IDS = 1 << 22
"""Limit of the largest id and of the number of tokens, because libraries build a list up to the largest id. The largest
known vocabularies have a million."""


def check_bounds(backend: tokenizers.Tokenizer, name: str) -> None:
    """Raise DataError for a tokenizer that may make a text far longer, or whose ids are too large.

    `name` is the tokenizer's folder or Hub name, for the error.
    """
    for problem in _problems(backend):
        raise DataError(f"tokenizer {name}: {problem}; choose another tokenizer")


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of the tokenizers library's Rust code.

    It panics, for example, if a regular expression takes too long. The class of such errors is not a subclass of
    Exception, and cannot be imported, so its name is compared.
    """
    return type(error).__name__ == "PanicException"


def _problems(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield a clause for each bound that a tokenizer exceeds, to follow its name in an error."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    yield from problems_of_ids(vocabulary.values())
    longest_token = max(map(len, vocabulary), default=0)
    if longest_token > MAX_TOKEN_CHARACTERS:
        yield f"a token has {longest_token:,} characters, expected at most {MAX_TOKEN_CHARACTERS:,}"
    yield from _problems_of_model(backend.model)

    encoding_steps = _steps_of(backend.normalizer) + _steps_of(backend.pre_tokenizer)
    yield from _problems_of_lengthening("encoding", encoding_steps)
    yield from _problems_of_lengthening("decoding", _steps_of(backend.decoder))
    yield from _problems_of_templates(_steps_of(backend.post_processor))


def problems_of_ids(ids: Iterable[int]) -> Iterator[str]:
    """Yield a clause for an error if a vocabulary has too many ids, or too large ones."""
    ids = list(ids)
    num_ids_needed = max(len(ids), max(ids, default=0) + 1)
    if num_ids_needed > MAX_IDS:
        yield f"its tokens need {num_ids_needed:,} ids, expected at most {MAX_IDS:,}"


def _problems_of_model(model: Any) -> Iterator[str]:
    """Yield a clause for an error for each setting of a tokenizer's model that is too large.

    Each type of model (BPE, WordPiece, ...) has only some of the settings.
    """
    for attribute in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, attribute, None)
        if isinstance(affix, str) and len(affix) > MAX_AFFIX_CHARACTERS:
            yield f"its {attribute} has {len(affix):,} characters, expected at most {MAX_AFFIX_CHARACTERS}"
    num_characters = getattr(model, "max_input_chars_per_word", None)
    if isinstance(num_characters, int) and num_characters > MAX_WORD_CHARACTERS:
        yield f"its max_input_chars_per_word is {num_characters:,}, expected at most {MAX_WORD_CHARACTERS:,}"


def _problems_of_lengthening(task: str, steps: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a clause for an error if the steps of a task may replace a character by too many.

    `task` is "encoding" or "decoding", for the text.
    """
    lengthening = math.prod(map(_lengthening_of, steps))
    num_byte_levels = sum(step["type"] == "ByteLevel" for step in steps)
    # A ByteLevel step converts bytes to characters. One is usual; any further one doubles characters outside ASCII.
    lengthening *= 2 ** max(0, num_byte_levels - 1)
    if lengthening > MAX_LENGTHENING:
        yield (
            f"its steps of {task} may make {min(lengthening, MAX_SHOWN_LENGTHENING):,.0f} characters of one, expected "
            f"at most {MAX_LENGTHENING}"
        )


def _steps_of(component: Any) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer as the library's JSON describes them, with all sequences flattened.

    `component` is a normalizer, pre-tokenizer, decoder or post-processor; None, for a part that is missing, has no
    steps.
    """
    if component is None:
        return []
    return list(_flatten(json.loads(component.__getstate__())))


def _flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a step, or for a sequence all steps in it, also in inner sequences.

    The key of a sequence's list depends on the part (`normalizers`, `decoders`, ...), so every list is taken.
    """
    if step["type"] != "Sequence":
        yield step
        return
    for value in step.values():
        if isinstance(value, list):
            for inner_step in value:
                yield from _flatten(inner_step)


def _lengthening_of(step: dict[str, Any]) -> float:
    """Return the factor by which one step of a tokenizer may lengthen a text; at least 1.

    `step` is the step's block in tokenizer.json: of the normalizer, the pre-tokenizer or the decoder. Only texts that
    the file's author has chosen count, such as the content of a `Replace`, because those could be made to fill the
    memory. Unicode normalisation has a fixed bound of its own.
    """
    step_type = step["type"]
    if step_type == "Replace":
        num_characters = _num_characters(step["content"])
        replaced_text = step["pattern"].get("String")
        if replaced_text:
            return max(1.0, num_characters / len(replaced_text))
        return 1.0 + num_characters  # a regular expression may match nothing between two characters
    if step_type == "Prepend":  # a part between two special tokens has at least one character
        return 1.0 + _num_characters(step["prepend"])
    if step_type == "Precompiled":
        longest = _longest_of_charsmap(base64.b64decode(step["precompiled_charsmap"] or ""))
        return max(1.0, longest / MAX_UNICODE_LENGTHENING)
    adds_a_space = step.get("prepend_scheme", "never") != "never" or bool(step.get("add_prefix_space"))
    return 2.0 if adds_a_space else 1.0


def _num_characters(text: str) -> int:
    """Return the most characters that a text may have after a later step has decomposed it (NFKD)."""
    return max(len(text), len(unicodedata.normalize("NFKD", text)))


def _longest_of_charsmap(charsmap: bytes) -> int:
    """Return the length of the longest replacement text in SentencePiece's precompiled map of characters.

    The map consists of the size of its index in four bytes, the index, and texts that each end with a zero byte.
    """
    start_of_texts = 4 + int.from_bytes(charsmap[:4], "little")
    texts = charsmap[start_of_texts:].split(b"\0")
    return max(len(text.decode(errors="replace")) for text in texts)


def _problems_of_templates(steps: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a clause for an error if the steps of a post-processor add too many ids to a text, or repeat it."""
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
