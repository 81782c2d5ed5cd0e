"""Checks that transformers tokenises texts with an exported tokenizer as this library does.

`AutoTokenizer` chooses a class by config.json and tokenizer_config.json, and some classes replace the pre-tokenizer or
the normalizer of tokenizer.json by their own. So the ids of many sample texts are compared after each export.
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
"""Texts of several scripts, with digits, spaces, line ends, contractions, code, and characters that normalizers
change."""
TOKENS_OF_A_TEXT = 64
"""Number of tokens that are decoded together into a further sample. The samples cover the whole vocabulary."""
MAX_ADDED_TOKENS = 1024
"""Largest number of added and special tokens that are tried, each between two words."""


def find_difference(folder: Path, ours: Tokenizer) -> str | None:
    """Describe the first difference between transformers' tokenizer of an exported folder and `ours`.

    The tokenizer is loaded by `AutoTokenizer`, as a user's program would load it. Nothing is downloaded, and no code of
    the folder runs. The ids of all sample texts must be equal, and so must the id that ends a text. Special tokens that
    a text spells out count as special tokens in both tokenizers.

    Returns a clause for an error, such as "GPT2Tokenizer makes 9 tokens of 'I'm sure' and the run 8, or others". A
    tokenizer that cannot be loaded is a difference. Returns None if there is no difference.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers warns of the class that it did not choose
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        class_name = type(theirs).__name__
        for text, our_ids in _samples_of(ours):
            their_ids = theirs(text, add_special_tokens=False, verbose=False)["input_ids"]
            if their_ids != our_ids:
                their_count = f"{class_name} makes {len(their_ids)} tokens of {_excerpt(text)}"
                return f"{their_count} and the run {len(our_ids)}, or others"
        if theirs.eos_token_id != ours.eos_token_id:
            return f"{class_name} ends texts with id {theirs.eos_token_id}, the run with {ours.eos_token_id}"
    except BaseException as error:
        # transformers raises almost anything for files that it cannot read, and its Rust code may panic. Interrupts of
        # the user are passed on.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        return f"AutoTokenizer cannot use it ({reason[:200]})"
    finally:
        logging.set_verbosity(verbosity)
    return None


def _samples_of(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yield sample texts, each with its token ids by our tokenizer.

    The texts are SAMPLES, texts that together contain every token of the vocabulary, and each added token between
    words. A text that the tokenizer cannot encode is left out, because no run has trained on it.

    While the samples are taken, the tokenizer is changed: special tokens that a text spells out are encoded as special
    tokens. At the end, or when the generator is closed, it is changed back.
    """
    # Texts of all tokens of the vocabulary, then of the added tokens.
    texts: list[str] = list(SAMPLES)
    added_tokens = tokenizer.backend.get_added_tokens_decoder()
    vocabulary_ids = set(tokenizer.backend.get_vocab(with_added_tokens=False).values())
    ordinary_ids = sorted(vocabulary_ids - added_tokens.keys())
    for start in range(0, len(ordinary_ids), TOKENS_OF_A_TEXT):
        texts.append(tokenizer.decode(ordinary_ids[start : start + TOKENS_OF_A_TEXT]))
    for token_id in sorted(added_tokens)[:MAX_ADDED_TOKENS]:
        token = added_tokens[token_id].content
        texts.append(f"a {token} b{token}")

    # transformers encodes special tokens in a text as such, so our tokenizer has to do the same here.
    tokenizer.backend.encode_special_tokens = False
    try:
        for text in texts:
            with contextlib.suppress(DataError):
                yield text, tokenizer.encode(text)
    finally:
        tokenizer.backend.encode_special_tokens = True


def _excerpt(text: str) -> str:
    """Return a text in quotes for an error. Only its beginning is returned if it has more than 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:39]}…")
