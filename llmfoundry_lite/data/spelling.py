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
LOST = ("no_token", "case", "replaced")
UNKNOWN = "\0unknown"
"""Token for characters without one, added to a model that would leave them out."""
SPACE_MARK = "▁"
"""SentencePiece's space."""
NUM_EXAMPLES = 8
NUM_STORED = 32


@dataclass(slots=True)
class LostText:
    """Count of the characters of some texts, and of those lost in each way."""

    characters: int = 0
    text_bytes: int = 0
    """Bytes of the texts in UTF-8."""
    lost_bytes: int = 0
    """Bytes of characters that no token stands for, white space included. The model never predicts them."""
    kinds: Counter[str] = field(default_factory=Counter)
    examples: Counter[str] = field(default_factory=Counter)
    """Lost characters."""

    def __iadd__(self, other: "LostText") -> "LostText":
        self.characters += other.characters
        self.text_bytes += other.text_bytes
        self.lost_bytes += other.lost_bytes
        self.kinds += other.kinds
        self.examples += other.examples
        return self

    def add(self, kind: str, character: str, count: int) -> None:
        self.kinds[kind] += count
        if kind in LOST:
            self.examples[character] += count

    @property
    def share(self) -> float:
        """Share of the characters that are lost."""
        return min(1, sum(self.kinds[kind] for kind in LOST) / max(self.characters, 1))

    @property
    def is_none(self) -> bool:
        return not self.lost_bytes and not any(self.kinds.values())

    def stored(self) -> str:
        """Return this count as text, for `load_lost_text`."""
        facts = {one.name: getattr(self, one.name) for one in fields(self)}
        return json.dumps(facts | {"examples": dict(self.examples.most_common(NUM_STORED))})

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers, and the most frequent of the lost characters."""
        most = [character for character, _ in self.examples.most_common(NUM_EXAMPLES)]
        numbers = {name: getattr(self, name) for name in ("characters", "text_bytes", "lost_bytes", "share")}
        return {**numbers, **{kind: self.kinds[kind] for kind in KINDS}, "examples": most}


def load_lost_text(stored: str) -> LostText:
    found = json.loads(stored)
    return LostText(**found | {name: Counter(found[name]) for name in ("kinds", "examples")})


def lost_text_from_json(found: dict[str, Any]) -> LostText:
    """Undo `LostText.as_json`. Each example counts once."""
    numbers = {name: int(found[name]) for name in ("characters", "text_bytes", "lost_bytes")}
    kinds = Counter({kind: int(found[kind]) for kind in KINDS})
    return LostText(**numbers, kinds=kinds, examples=Counter(map(str, found["examples"])))


def describe_lost_text(loss: dict[str, Any]) -> str:
    """Say in a sentence what `LostText.as_json` counts; empty where every character comes back."""
    texts = {kind: f"{loss[kind]:,} {words}" for kind, words in KINDS.items() if loss[kind]}
    lost, apart = ("; ".join(texts[kind] for kind in texts if (kind in LOST) is is_lost) for is_lost in (True, False))
    parts = [f"{percent(loss['share'])} of characters do not come back ({lost}{_such_as(loss)})"] if lost else []
    parts += [f"of {loss['characters']:,} characters, {apart}"] if apart else []
    return "; ".join(parts)


def _such_as(loss: dict[str, Any]) -> str:
    return f"; most often {' '.join(map(repr, loss['examples']))}" if loss["examples"] else ""


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


class Speller:
    """Finds the text that a tokenizer loses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def measure(self, text: str) -> LostText:
        """Count the characters of a text that do not come back from its tokens."""
        loss = LostText(len(text), len(text.encode()))
        if self.tokenizer.decode(self.tokenizer.encode(text)) == text:
            return loss
        normal = self._normalised(text)
        shown = normal.replace(SPACE_MARK, " ") if SPACE_MARK in self._normalised("a a") else normal
        really_gone = _less(text, shown, "NFKC")
        for character, count in _less(text, shown, "NFC").items():
            loss.add(_kind_of_change(character, really_gone, shown), character, count)
        is_spelled = self._spelled(normal)
        missing = "".join(c for c, spelled in zip(shown, is_spelled, strict=True) if not spelled)
        unspelled = Counter(unicodedata.normalize("NFC", missing))  # as in the text: 한 is one, not three
        for character, count in unspelled.items():
            if not character.isspace():
                loss.add("no_token", character, count)
                loss.lost_bytes += count * len(character.encode())
        num_spaces = _num_spaces(text)
        # A space that the normaliser changed into something without a token is lost once, not twice.
        loss.kinds["white_space"] = min(num_spaces, loss.kinds["white_space"] + _lost_space(shown, is_spelled))
        num_added = _num_spaces(shown) - num_spaces  # the normaliser may add or remove some
        loss.lost_bytes += max(0, sum(count for c, count in unspelled.items() if c.isspace()) - num_added)
        loss.lost_bytes = min(loss.lost_bytes, loss.text_bytes)
        return loss

    @cached_property
    def _marking(self) -> tuple[tokenizers.Tokenizer, int | None]:
        """Return the tokenizer without its normaliser, and the id that marks a character without a token.

        The post-processor is removed too, as it may cut spaces off the offsets of tokens that spell them.
        """
        backend = self.tokenizer.backend
        stored = json.loads(backend.to_str())
        model, stored["normalizer"], stored["post_processor"] = stored["model"], None, None
        if model["type"] == "BPE" and not model.get("unk_token"):  # BPE leaves such characters out, and shifts offsets
            vocabulary = backend.get_vocab(with_added_tokens=True)
            model["vocab"][UNKNOWN] = max(vocabulary.values()) + len(vocabulary)  # above added tokens' new ids
            model["unk_token"] = UNKNOWN
        for token in stored["added_tokens"]:
            token["content"] = self._normalised(token["content"])
        marking = tokenizers.Tokenizer.from_str(json.dumps(stored))
        marking.encode_special_tokens = True
        unknown_token = model.get("unk_token")
        return marking, marking.token_to_id(unknown_token) if unknown_token else model.get("unk_id")

    @cached_property
    def _kept(self) -> re.Pattern[str]:
        """Pattern of added tokens that are found before a text is normalised."""
        added = self.tokenizer.backend.get_added_tokens_decoder().values()
        kept = [token.content for token in added if not token.special and not token.normalized]
        return re.compile(f"({'|'.join(map(re.escape, sorted(kept, key=len, reverse=True)))})" if kept else r"($^)")

    def _normalised(self, text: str) -> str:
        normaliser = self.tokenizer.backend.normalizer
        if normaliser is None:
            return text
        parts = self._kept.split(text)
        with self.tokenizer.naming_failures():
            return "".join(part if n % 2 else normaliser.normalize_str(part) for n, part in enumerate(parts))

    def _spelled(self, normal: str) -> bytearray:
        """Return 1 for each character of a normalised text that a token stands for."""
        marking, unknown_id = self._marking
        with self.tokenizer.naming_failures():
            encoding = marking.encode(normal, add_special_tokens=False)
        is_spelled, unknown = bytearray(len(normal)), []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            is_spelled[start:end] = b"\1" * (end - start)
            if token_id == unknown_id:
                unknown.append((start, end))
        for start, end in unknown:  # last, as the mark of a word's beginning shares the offsets of its first character
            is_spelled[start:end] = bytes(end - start)
        return is_spelled


def _num_spaces(text: str) -> int:
    return sum(map(str.isspace, text))


def _lost_space(text: str, is_spelled: bytearray) -> int:
    """Count white space that no token stands for, less one space between two words."""
    lost = 0
    for run in re.finditer(r"\s+", text):
        start, end = run.span()
        missing = "".join(c for c, spelled in zip(run[0], is_spelled[start:end], strict=True) if not spelled)
        lost += len(missing) - (" " in missing and start > 0 and end < len(text))
    return lost


def _less(text: str, other: str, form: Literal["NFC", "NFKC"]) -> Counter[str]:
    """Count the characters that `text` has more often than `other`, both in a normal form of Unicode."""
    return Counter(unicodedata.normalize(form, text)) - Counter(unicodedata.normalize(form, other))


def _kind_of_change(character: str, really_gone: Counter[str], normal: str) -> str:
    """Return the kind of a character's change. `really_gone` are characters that compatible forms do not explain."""
    if character.isspace():
        return "white_space"
    if not any(c in really_gone for c in unicodedata.normalize("NFKC", character)):
        return "compatibility"
    small = character.lower()
    return "case" if small != character and small in normal else "replaced"
