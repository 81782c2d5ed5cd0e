"""Proof that transformers makes of an exported folder's tokenizer what we make of it: the same ids of the same texts.

`AutoTokenizer` chooses a class by config.json and tokenizer_config.json, and some classes replace the pre-tokenizer or
the normalizer of tokenizer.json by their own.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.data.tokenizer_bounds import is_panic
from llmfoundry_lite.errors import DataError

SAMPLES = (
    "",
    "The quick brown fox jumps over the lazy dog.",
    " Leading space, two  spaces,   three, and a trailing one ",
    "I'm sure they'll say it's what we've got; DON'T, YOU'RE, he'd, 's, ’tis",
    "1 12 123 1234 12345 3.14159 1,000,000 2026-11-29 0x1F x2y3",
    "one\ntwo\n\nthree\r\nfour\n  indented\n\n\n   \n\tand a tab\t\tor two",
    "def f(x):\n    return {'a': [x**2, x//3], \"b\": x != 0}  # comment\n",
    "https://example.org/a?b=c&d=%20 user@example.org C++ C# <b>&amp;</b> $5.00 50% (a) [b] {c}",
    "naïve café Straße Ångström cafe\u0301 A\u030angstro\u0308m ﬁne ½ Ⅷ ｆｕｌｌ İstanbul",
    "Привет, мир! Ελληνικά γράμματα. שלום עולם",
    "العربية ١٢٣ हिन्दी में पाठ १२३ ภาษาไทย தமிழ்",
    "漢字とかなカナ、全角　空白。中文文本，标点！한국어 문장 \u1112\u1161\u11ab",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☕️ – — … “quoted” ‘so’ \u200b\ufeff\u00ad\u00a0\u2028",
    "\x00\x07\x1b[0m\x7f ▁ Ġ <0x0A> <unk> [UNK]",
)
"""Texts of several scripts, with digits, spaces, line ends, contractions, code, and what normalizers change."""
TOKENS_OF_A_TEXT = 64
"""Number of tokens whose texts are joined to a further sample, so that every token of the vocabulary takes part."""
MAX_ADDED_TOKENS = 1024
"""Number of added and special tokens that are tried, each between two words."""


def find_difference(folder: Path, ours: Tokenizer) -> str | None:
    """Describe the first text that transformers tokenises differently from `ours`; None if all ids are equal.

    `folder` is an exported model, whose tokenizer `AutoTokenizer` loads as a user's program would. The id that ends a
    text must be equal, too. Special tokens that a text spells out count as special tokens on both sides. Nothing is
    downloaded, and no code of the folder runs. A tokenizer that cannot be loaded is a difference.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of the class that it did not choose
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        for text, our_ids in _samples_of(ours):
            their_ids = theirs(text, add_special_tokens=False, verbose=False)["input_ids"]
            if their_ids != our_ids:
                name = type(theirs).__name__
                return f"{name} makes {len(their_ids)} tokens of {_excerpt(text)} and the run {len(our_ids)}, or others"
        if theirs.eos_token_id != ours.eos_token_id:
            return f"{type(theirs).__name__} ends texts with id {theirs.eos_token_id}, the run with {ours.eos_token_id}"
    except BaseException as error:  # it raises almost anything for files that it cannot read
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        return f"AutoTokenizer cannot use it ({reason[:200]})"
    finally:
        logging.set_verbosity(verbosity)
    return None


def _samples_of(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yield texts and the ids that our tokenizer makes of them.

    They are SAMPLES, texts that together contain every token of the vocabulary, and each added token between words. A
    text that the tokenizer cannot encode is left out, because no run has trained on it.
    """
    added_tokens = tokenizer.backend.get_added_tokens_decoder()
    ids = sorted(set(tokenizer.backend.get_vocab(with_added_tokens=False).values()) - added_tokens.keys())
    texts: list[str] = list(SAMPLES)
    for start in range(0, len(ids), TOKENS_OF_A_TEXT):
        texts.append(tokenizer.decode(ids[start : start + TOKENS_OF_A_TEXT]))
    for token_id in sorted(added_tokens)[:MAX_ADDED_TOKENS]:
        token = added_tokens[token_id].content
        texts.append(f"a {token} b{token}")

    # Special tokens in a text count as such until the last text is encoded, as in transformers.
    tokenizer.backend.encode_special_tokens = False
    try:
        for text in texts:
            with contextlib.suppress(DataError):
                yield text, tokenizer.encode(text)
    finally:
        tokenizer.backend.encode_special_tokens = True


def _excerpt(text: str) -> str:
    """Return the beginning of a text in quotes, for an error."""
    return repr(text if len(text) <= 40 else f"{text[:39]}…")
