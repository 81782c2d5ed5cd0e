"""Text that a tokenizer loses: characters that do not come back when a text is encoded and decoded.

`decode(encode(text))` alone is not enough. If it returns the text, nothing is lost. If not, the ids may still represent
all of it, because a decoder may be missing, or put spaces between tokens. Then each character is looked up in the
tokens' offsets, and the normalised text is compared with the text.

| kind          | what happens to a character                                      | lost |
|---------------|------------------------------------------------------------------|------|
| no_token      | it becomes the unknown token, or no token                        | yes  |
| case          | the normaliser changes it to lower case                          | yes  |
| replaced      | the normaliser changes it to another character: é to e           | yes  |
| compatibility | the normaliser changes it to a compatible form (NFKC): ﬁ to fi   | no   |
| white_space   | more than one space between words, a line end or a tab           | no   |

Canonically equal forms (NFC, NFD) are the same text. A single space between words counts as kept without a token.

A `Speller` measures what one tokenizer loses, as a `LostText`. `describe_lost_text` describes it in a sentence.
"""

import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import tokenizers

from llmfoundry_lite.data.tokenizer import Tokenizer

KINDS = {
    "no_token": "have no token",
    "case": "become lower case",
    "replaced": "become other characters",
    "compatibility": "are written in another form",
    "white_space": "are white space that is not kept",
}
"""Kind of changed characters -> its description after their number: "5 have no token"."""
LOST = ("no_token", "case", "replaced")
"""Kinds that count as lost."""
UNKNOWN = "\0unknown"
"""Unknown token that is added to a model without one, so that characters without a token can be located."""
SPACE_MARK = "▁"
"""Character that SentencePiece puts in place of a space."""
NUM_EXAMPLES = 8
"""Number of lost characters that are reported, the most frequent ones."""
NUM_STORED_EXAMPLES = 32
"""Number of lost characters that are stored for a part of the texts. It is larger than NUM_EXAMPLES, so that the most
frequent ones of all parts together are very likely among them."""


@dataclass(slots=True)
class LostText:
    """Counts of the characters in some texts, and of those that a tokenizer changes or loses. Counts can be added."""

    characters: int = 0
    text_bytes: int = 0
    """Bytes of the texts in UTF-8."""
    lost_bytes: int = 0
    """UTF-8 bytes of characters that no token represents, white space included. The model never predicts them."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of changed characters for each of the module's `KINDS`."""
    examples: Counter[str] = field(default_factory=Counter)
    """Lost characters, with how often each is lost."""

    def __iadd__(self, other: "LostText") -> "LostText":
        """Add the counts of other texts to this object."""
        self.characters += other.characters
        self.text_bytes += other.text_bytes
        self.lost_bytes += other.lost_bytes
        self.kinds += other.kinds
        self.examples += other.examples
        return self

    def add(self, kind: str, character: str, count: int) -> None:
        """Record that a character has been changed `count` times in the way that `kind`, one of `KINDS`, names.

        If characters of this kind are lost, the character becomes one of `examples`.
        """
        self.kinds[kind] += count
        if kind in LOST:
            self.examples[character] += count

    @property
    def lost_fraction(self) -> float:
        """Fraction of the characters that are lost, from 0 to 1."""
        num_lost = sum(self.kinds[kind] for kind in LOST)
        return min(1, num_lost / max(self.characters, 1))

    @property
    def is_empty(self) -> bool:
        """Whether no character is changed, and every byte is represented by a token."""
        return not self.lost_bytes and not any(self.kinds.values())

    def as_text(self) -> str:
        """Serialize the counts as JSON, for `load_lost_text`.

        Must not change, because digests of results contain it.
        """
        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        values["examples"] = dict(self.examples.most_common(NUM_STORED_EXAMPLES))
        return json.dumps(values)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as records and summaries store them, with the most frequent lost characters as examples."""
        numbers = {
            "characters": self.characters,
            "text_bytes": self.text_bytes,
            "lost_bytes": self.lost_bytes,
            "share": self.lost_fraction,
        }
        counts = {kind: self.kinds[kind] for kind in KINDS}
        examples = [character for character, _ in self.examples.most_common(NUM_EXAMPLES)]
        return {**numbers, **counts, "examples": examples}


def load_lost_text(text: str) -> LostText:
    """Deserialize the result of `LostText.as_text`."""
    values = json.loads(text)
    for name in ("kinds", "examples"):
        values[name] = Counter(values[name])
    return LostText(**values)


def lost_text_from_json(record: dict[str, Any]) -> LostText:
    """Build a `LostText` from the result of `LostText.as_json`, which has no counts of examples: each gets count 1."""
    numbers = {name: int(record[name]) for name in ("characters", "text_bytes", "lost_bytes")}
    kinds = Counter({kind: int(record[kind]) for kind in KINDS})
    return LostText(**numbers, kinds=kinds, examples=Counter(map(str, record["examples"])))


def describe_lost_text(record: dict[str, Any]) -> str:
    """Describe the result of `LostText.as_json` in a sentence; empty if every character comes back.

    An example: 3 % of characters do not come back (2 have no token; 1 become lower case; most often 'б' 'A'); of 100
    characters, 1 are written in another form
    """
    # Describe each kind of change that occurs, separately for characters that are lost and for others.
    lost_kinds = []
    other_kinds = []
    for kind, words in KINDS.items():
        if record[kind]:
            descriptions = lost_kinds if kind in LOST else other_kinds
            descriptions.append(f"{record[kind]:,} {words}")

    # Join them.
    clauses = []
    if lost_kinds:
        if record["examples"]:
            lost_kinds.append(f"most often {' '.join(map(repr, record['examples']))}")
        clauses.append(f"{percent(record['share'])} of characters do not come back ({'; '.join(lost_kinds)})")
    if other_kinds:
        clauses.append(f"of {record['characters']:,} characters, {'; '.join(other_kinds)}")
    return "; ".join(clauses)


def percent(fraction: float) -> str:
    """Format a fraction as a percentage with two digits: 0.031 as "3.1 %", 0.31 as "31 %"."""
    return f"{100 * fraction:.2g} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"


class Speller:
    """Measures which characters of a text a tokenizer changes or loses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take the tokenizer to examine."""
        self.tokenizer = tokenizer

    def measure(self, text: str) -> LostText:
        """Count the characters of a text that do not come back from its tokens. Raises DataError as `encode` does.

        With a tokenizer that removes accents, changes letters to lower case, and has no token for "7", the text "É 7"
        has one character that is replaced, "É", and one that has no token, "7".
        """
        loss = LostText(len(text), len(text.encode()))
        if self.tokenizer.decode(self.tokenizer.encode(text)) == text:
            return loss

        # Characters that the normaliser changes.
        normalised = self._normalise(text)
        # The normalised text as a reader would write it: `marks_spaces` is whether it has SPACE_MARK instead of spaces.
        marks_spaces = SPACE_MARK in self._normalise("a a")
        readable = normalised.replace(SPACE_MARK, " ") if marks_spaces else normalised
        self._count_changed(text, readable, loss)

        # Characters that no token represents. They are counted in composed form, as in the text: 한 is one, not three.
        is_represented = self._find_represented(normalised)
        missing_text = "".join(c for c, represented in zip(readable, is_represented, strict=True) if not represented)
        num_missing_spaces = 0
        for character, count in Counter(unicodedata.normalize("NFC", missing_text)).items():
            if character.isspace():
                num_missing_spaces += count
            else:
                loss.add("no_token", character, count)
                loss.lost_bytes += count * len(character.encode())

        # White space that the normaliser changed into something without a token is lost once, not twice.
        num_spaces = _count_spaces(text)
        num_lost_spaces = loss.kinds["white_space"] + _count_lost_spaces(readable, is_represented)
        loss.kinds["white_space"] = min(num_spaces, num_lost_spaces)
        num_added_spaces = _count_spaces(readable) - num_spaces  # by the normaliser; negative if it removes some
        loss.lost_bytes += max(0, num_missing_spaces - num_added_spaces)
        loss.lost_bytes = min(loss.lost_bytes, loss.text_bytes)
        return loss

    def _count_changed(self, text: str, readable: str, loss: LostText) -> None:
        """Count in `loss` the characters of a text that the normaliser has changed. `readable` is its result."""
        incompatible = _count_missing(text, readable, "NFKC")
        for character, count in _count_missing(text, readable, "NFC").items():
            loss.add(_kind_of_change(character, incompatible, readable), character, count)

    @cached_property
    def _marking_backend(self) -> tuple[tokenizers.Tokenizer, int | None]:
        """A copy of the tokenizer that marks characters without a token, and the id that marks them (or None).

        The copy encodes text that has been normalised already, so it has no normaliser. It has no post-processor,
        because that may remove spaces from the offsets of tokens. If the model has no unknown token, the copy gets one,
        so that each character without a token becomes that token and can be located by its offsets.
        """
        backend = self.tokenizer.backend
        stored = json.loads(backend.to_str())
        stored["normalizer"] = None
        stored["post_processor"] = None

        # Add an unknown token, and normalise the added tokens as the text will be.
        model = stored["model"]
        if model["type"] == "BPE" and not model.get("unk_token"):  # BPE would drop such characters, and shift offsets
            vocabulary = backend.get_vocab(with_added_tokens=True)
            model["vocab"][UNKNOWN] = max(vocabulary.values()) + len(vocabulary)  # above all ids
            model["unk_token"] = UNKNOWN
        for token in stored["added_tokens"]:
            token["content"] = self._normalise(token["content"])

        marking = tokenizers.Tokenizer.from_str(json.dumps(stored))
        marking.encode_special_tokens = True
        unknown_token = model.get("unk_token")
        unknown_id = marking.token_to_id(unknown_token) if unknown_token else model.get("unk_id")
        return marking, unknown_id

    @cached_property
    def _tokens_before_normaliser(self) -> re.Pattern[str]:
        """Regular expression of the added tokens that the library finds before it normalises a text.

        Longer tokens come first, because the library takes the longest one that matches.
        """
        contents = []
        for token in self.tokenizer.backend.get_added_tokens_decoder().values():
            if not token.special and not token.normalized:
                contents.append(token.content)
        if not contents:
            return re.compile(r"($^)")  # no such token: match nothing
        longest_first = sorted(contents, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _normalise(self, text: str) -> str:
        """Return a text after the tokenizer's normaliser, which does not change some of the added tokens."""
        normaliser = self.tokenizer.backend.normalizer
        if normaliser is None:
            return text
        # Splitting by a pattern in parentheses returns the texts at even indices, and the matches between them.
        parts = self._tokens_before_normaliser.split(text)
        with self.tokenizer.failures_as_data_errors():
            for index in range(0, len(parts), 2):
                parts[index] = normaliser.normalize_str(parts[index])
        return "".join(parts)

    def _find_represented(self, normalised: str) -> bytearray:
        """Return a flag for each character of a normalised text: 1 if a token represents it, and 0 otherwise."""
        marking, unknown_id = self._marking_backend
        with self.tokenizer.failures_as_data_errors():
            encoding = marking.encode(normalised, add_special_tokens=False)

        is_represented = bytearray(len(normalised))
        unknown_spans = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            is_represented[start:end] = b"\1" * (end - start)
            if token_id == unknown_id:
                unknown_spans.append((start, end))
        # Unknown tokens come last, because the token for a word's beginning has the offsets of its first character.
        for start, end in unknown_spans:
            is_represented[start:end] = bytes(end - start)
        return is_represented


def _count_spaces(text: str) -> int:
    """Count the white-space characters of a text."""
    return sum(map(str.isspace, text))


def _count_lost_spaces(text: str, is_represented: bytearray) -> int:
    """Count the white-space characters that no token represents.

    One space between two words is not counted, because a decoder can put it back. If no token represents white space,
    "a  b\\n" has lost one space and the line end. `is_represented` has a flag for each character of the text.
    """
    num_lost = 0
    for match in re.finditer(r"\s+", text):
        start, end = match.span()
        flags = is_represented[start:end]
        missing = "".join(c for c, represented in zip(match[0], flags, strict=True) if not represented)
        is_between_words = start > 0 and end < len(text)
        num_lost += len(missing)
        if is_between_words and " " in missing:
            num_lost -= 1
    return num_lost


def _count_missing(text: str, other: str, form: Literal["NFC", "NFKC"]) -> Counter[str]:
    """Return the characters that `text` has more often than `other`, and how many more.

    Both texts are converted to a normal form of Unicode first, so that equal characters compare equal.
    """
    return Counter(unicodedata.normalize(form, text)) - Counter(unicodedata.normalize(form, other))


def _kind_of_change(character: str, incompatible: Counter[str], normalised: str) -> str:
    """Return in which way, one of `KINDS`, the normaliser has changed a character of a text.

    `normalised` is the normalised text. `incompatible` are the characters of the text that it does not contain even in
    a compatible form (NFKC).
    """
    if character.isspace():
        return "white_space"
    if not any(c in incompatible for c in unicodedata.normalize("NFKC", character)):
        return "compatibility"
    lower = character.lower()
    is_lowered = lower != character and lower in normalised
    return "case" if is_lowered else "replaced"
