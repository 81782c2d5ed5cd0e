"""Text that a tokenizer loses: characters that its tokens do not spell.

`decode(encode(text))` alone does not tell. If the text comes back, it is whole. If not, the ids may still hold all of
it, since a decoder may be missing or put spaces between tokens. Then each character is looked up in the tokens'
offsets, and the normalised text is compared with the text.

| kind          | what became of a character                                   | lost |
|---------------|--------------------------------------------------------------|------|
| no_token      | the unknown token stands for it, or none                     | yes  |
| case          | the normaliser made it lower case                            | yes  |
| replaced      | the normaliser made another character of it: é became e      | yes  |
| compatibility | the normaliser wrote it in another form (NFKC): ﬁ became fi  | no   |
| white_space   | more than one space between words, a line end or a tab       | no   |

Canonically equal forms (NFC, NFD) are one text. One space between words is implied where no token spells it.

A `Speller` finds what one tokenizer loses, and counts it in a `LostText`. `describe_lost_text` makes a sentence of it.
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
"""Kinds of changed characters, and the words for them in a sentence: "5 have no token"."""
LOST = ("no_token", "case", "replaced")
"""Kinds that count as lost."""
UNKNOWN = "\0unknown"
"""Token for characters without one, added to a model that would leave them out."""
SPACE_MARK = "▁"
"""SentencePiece's space."""
NUM_EXAMPLES = 8
"""Lost characters that are reported."""
NUM_STORED_EXAMPLES = 32
"""Lost characters of a part of the texts that are kept, so that the reported ones are right for the whole."""


@dataclass(slots=True)
class LostText:
    """Count of the characters of some texts, and of those lost in each way. Counts of several texts can be added."""

    characters: int = 0
    text_bytes: int = 0
    """Bytes of the texts in UTF-8."""
    lost_bytes: int = 0
    """Bytes of characters that no token stands for, white space included. The model never predicts them."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Changed characters of each of `KINDS`."""
    examples: Counter[str] = field(default_factory=Counter)
    """Lost characters."""

    def __iadd__(self, other: "LostText") -> "LostText":
        """Add the counts of other texts."""
        self.characters += other.characters
        self.text_bytes += other.text_bytes
        self.lost_bytes += other.lost_bytes
        self.kinds += other.kinds
        self.examples += other.examples
        return self

    def add(self, kind: str, character: str, count: int) -> None:
        """Count a character that is changed `count` times. It is an example if its kind counts as lost."""
        self.kinds[kind] += count
        if kind in LOST:
            self.examples[character] += count

    @property
    def share(self) -> float:
        """Share of the characters that are lost."""
        num_lost = sum(self.kinds[kind] for kind in LOST)
        return min(1, num_lost / max(self.characters, 1))

    @property
    def is_empty(self) -> bool:
        """Whether no character is changed, and none left out."""
        return not self.lost_bytes and not any(self.kinds.values())

    def as_text(self) -> str:
        """Return this count as text, for `load_lost_text`. Digests of results contain it, so it must not change."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["examples"] = dict(self.examples.most_common(NUM_STORED_EXAMPLES))
        return json.dumps(values)

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers, and the most frequent of the lost characters, as records and summaries keep them."""
        numbers = {
            "characters": self.characters,
            "text_bytes": self.text_bytes,
            "lost_bytes": self.lost_bytes,
            "share": self.share,
        }
        counts = {kind: self.kinds[kind] for kind in KINDS}
        examples = [character for character, _ in self.examples.most_common(NUM_EXAMPLES)]
        return {**numbers, **counts, "examples": examples}


def load_lost_text(text: str) -> LostText:
    """Undo `LostText.as_text`."""
    values = json.loads(text)
    for name in ("kinds", "examples"):
        values[name] = Counter(values[name])
    return LostText(**values)


def lost_text_from_json(record: dict[str, Any]) -> LostText:
    """Undo `LostText.as_json`. Each example counts once."""
    numbers = {name: int(record[name]) for name in ("characters", "text_bytes", "lost_bytes")}
    kinds = Counter({kind: int(record[kind]) for kind in KINDS})
    return LostText(**numbers, kinds=kinds, examples=Counter(map(str, record["examples"])))


def describe_lost_text(record: dict[str, Any]) -> str:
    """Say in a sentence what `LostText.as_json` counts; empty where every character comes back.

    Such as: 3 % of characters do not come back (2 have no token; 1 become lower case; most often 'б' 'A'); of 100
    characters, 1 are written in another form
    """
    lost = []
    kept = []
    for kind, words in KINDS.items():
        if record[kind]:
            texts = lost if kind in LOST else kept
            texts.append(f"{record[kind]:,} {words}")

    parts = []
    if lost:
        if record["examples"]:
            lost.append(f"most often {' '.join(map(repr, record['examples']))}")
        parts.append(f"{percent(record['share'])} of characters do not come back ({'; '.join(lost)})")
    if kept:
        parts.append(f"of {record['characters']:,} characters, {'; '.join(kept)}")
    return "; ".join(parts)


def percent(share: float) -> str:
    """Format a share with two digits: 0.031 is "3.1 %", 0.31 is "31 %"."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


class Speller:
    """Finds the text that a tokenizer loses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def measure(self, text: str) -> LostText:
        """Count the characters of a text that do not come back from its tokens. Raises DataError as `encode` does."""
        loss = LostText(len(text), len(text.encode()))
        if self.tokenizer.decode(self.tokenizer.encode(text)) == text:
            return loss

        # Characters that the normaliser has changed.
        normalised = self._normalise(text)
        marks_spaces = SPACE_MARK in self._normalise("a a")
        shown = normalised.replace(SPACE_MARK, " ") if marks_spaces else normalised
        gone = _count_missing(text, shown, "NFKC")
        for character, count in _count_missing(text, shown, "NFC").items():
            loss.add(_kind_of_change(character, gone, shown), character, count)

        # Characters that no token stands for. They are counted as in the text: 한 is one, not three.
        is_spelled = self._find_spelled(normalised)
        unspelled_text = "".join(c for c, spelled in zip(shown, is_spelled, strict=True) if not spelled)
        unspelled = Counter(unicodedata.normalize("NFC", unspelled_text))
        num_unspelled_spaces = 0
        for character, count in unspelled.items():
            if character.isspace():
                num_unspelled_spaces += count
            else:
                loss.add("no_token", character, count)
                loss.lost_bytes += count * len(character.encode())

        # A space that the normaliser changed into something without a token is lost once, not twice.
        num_spaces = _count_spaces(text)
        num_lost_spaces = loss.kinds["white_space"] + _count_lost_spaces(shown, is_spelled)
        loss.kinds["white_space"] = min(num_spaces, num_lost_spaces)
        num_added_spaces = _count_spaces(shown) - num_spaces  # by the normaliser; below 0 if it removes some
        loss.lost_bytes += max(0, num_unspelled_spaces - num_added_spaces)
        loss.lost_bytes = min(loss.lost_bytes, loss.text_bytes)
        return loss

    @cached_property
    def _marking_backend(self) -> tuple[tokenizers.Tokenizer, int | None]:
        """The tokenizer without its normaliser, and the id that marks a character without a token.

        The post-processor is removed too, as it may cut spaces off the offsets of tokens that spell them.
        """
        backend = self.tokenizer.backend
        stored = json.loads(backend.to_str())
        stored["normalizer"] = None
        stored["post_processor"] = None

        model = stored["model"]
        if model["type"] == "BPE" and not model.get("unk_token"):  # BPE leaves such characters out, and shifts offsets
            vocabulary = backend.get_vocab(with_added_tokens=True)
            model["vocab"][UNKNOWN] = max(vocabulary.values()) + len(vocabulary)  # above added tokens' new ids
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
        """Pattern of added tokens that are found before a text is normalised. The longest one that fits counts."""
        contents = []
        for token in self.tokenizer.backend.get_added_tokens_decoder().values():
            if not token.special and not token.normalized:
                contents.append(token.content)
        if not contents:
            return re.compile(r"($^)")  # matches nowhere
        longest_first = sorted(contents, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _normalise(self, text: str) -> str:
        """Return a text as the tokenizer's normaliser makes it, which passes over some added tokens."""
        normaliser = self.tokenizer.backend.normalizer
        if normaliser is None:
            return text
        # Splitting by a pattern in parentheses returns texts and matches in turn.
        parts = self._tokens_before_normaliser.split(text)
        with self.tokenizer.failures_as_data_errors():
            for number in range(0, len(parts), 2):
                parts[number] = normaliser.normalize_str(parts[number])
        return "".join(parts)

    def _find_spelled(self, normalised: str) -> bytearray:
        """Return 1 for each character of a normalised text that a token stands for, and 0 for the others."""
        marking, unknown_id = self._marking_backend
        with self.tokenizer.failures_as_data_errors():
            encoding = marking.encode(normalised, add_special_tokens=False)

        is_spelled = bytearray(len(normalised))
        unknown_spans = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            is_spelled[start:end] = b"\1" * (end - start)
            if token_id == unknown_id:
                unknown_spans.append((start, end))
        # Unknown ones last, as the mark of a word's beginning shares the offsets of its first character.
        for start, end in unknown_spans:
            is_spelled[start:end] = bytes(end - start)
        return is_spelled


def _count_spaces(text: str) -> int:
    """Count the characters of a text that are white space."""
    return sum(map(str.isspace, text))


def _count_lost_spaces(text: str, is_spelled: bytearray) -> int:
    """Count white space that no token stands for, less one space between two words."""
    num_lost = 0
    for match in re.finditer(r"\s+", text):
        start, end = match.span()
        unspelled = "".join(c for c, spelled in zip(match[0], is_spelled[start:end], strict=True) if not spelled)
        is_between_words = start > 0 and end < len(text)
        num_lost += len(unspelled)
        if is_between_words and " " in unspelled:
            num_lost -= 1
    return num_lost


def _count_missing(text: str, other: str, form: Literal["NFC", "NFKC"]) -> Counter[str]:
    """Count the characters that `text` has more often than `other`, both in a normal form of Unicode."""
    return Counter(unicodedata.normalize(form, text)) - Counter(unicodedata.normalize(form, other))


def _kind_of_change(character: str, gone: Counter[str], normalised: str) -> str:
    """Return which of `KINDS` a change of a character by the normaliser is.

    `gone` are the characters that are missing even where compatible forms count as one.
    """
    if character.isspace():
        return "white_space"
    if not any(c in gone for c in unicodedata.normalize("NFKC", character)):
        return "compatibility"
    lower = character.lower()
    is_lowered = lower != character and lower in normalised
    return "case" if is_lowered else "replaced"
