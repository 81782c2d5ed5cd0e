"""Text that tokenizers lose, by kind; and text that comes back although decoders differ from encoders."""

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from llmfoundry_lite.data.spelling import Speller, describe_lost_text, load_lost_text
from llmfoundry_lite.data.tokenizer import Tokenizer, build_tokenizer

WORDS = ["alpha beta gamma delta river stone cloud engine , . ' f i 1 2 " * 50]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MARKED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def bpe(special: tuple[str, ...] = ("<eos>",), *, alphabet=(), vocab_size: int = 400, model=None, **parts) -> Tokenizer:
    return trained(model or models.BPE(), trainers.BpeTrainer, special, parts, vocab_size, initial_alphabet=alphabet)


def trained(model, trainer, special, parts, vocab_size=120, **options) -> Tokenizer:
    backend = Backend(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    special_tokens = list(special)
    backend.train_from_iterator(
        WORDS, trainer(vocab_size=vocab_size, special_tokens=special_tokens, show_progress=False, **options)
    )
    return build_tokenizer("made here", backend, {"eos_token": "<eos>"})


def measured(tokenizer: Tokenizer, text: str) -> tuple[dict[str, int], int]:
    """The kinds that are not 0, and the bytes that no token stands for."""
    loss = Speller(tokenizer).measure(text)
    assert load_lost_text(loss.as_text()) == loss and loss.characters == len(text)
    return {kind: count for kind, count in loss.kinds.items() if count}, loss.lost_bytes


def byte_level(**parts) -> Tokenizer:
    return bpe(alphabet=ALPHABET, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), **parts)


def unigram(**parts) -> Tokenizer:
    special = ("<unk>", "<eos>")
    parts = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace(), **parts}
    return trained(models.Unigram(), trainers.UnigramTrainer, special, parts, 60, unk_token="<unk>")


def word_piece(**options) -> Tokenizer:
    parts = {"normalizer": normalizers.BertNormalizer(**options), "decoder": decoders.WordPiece()}
    parts["pre_tokenizer"] = pre_tokenizers.BertPreTokenizer()
    return trained(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, ("[UNK]", "<eos>"), parts)


def with_added(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.backend.add_tokens(list(tokens))
    return tokenizer


def byte_fallback() -> Tokenizer:
    special = ("<unk>", "<eos>", *(f"<0x{i:02X}>" for i in range(256)))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.BPE(byte_fallback=True, unk_token="<unk>")
    return bpe(special, model=model, normalizer=MARKED, decoder=decoders.Sequence(parts))


ALL = "alpha beta é\n\n  Ωб 漢字 😀 <unk> <eos>\tﬁ e\u0301 ▁x"


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(decoder=decoders.ByteLevel()),
        byte_level(),  # without a decoder
        byte_level(decoder=decoders.WordPiece()),  # which puts spaces between tokens and cleans up
        byte_level(normalizer=normalizers.NFC(), decoder=decoders.WordPiece()),  # canonically the same text
        bpe(alphabet=ALPHABET, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        byte_level(post_processor=processors.ByteLevel(trim_offsets=True)),  # whose offsets leave spaces out
        with_added(byte_level(), AddedToken("beta", normalized=False), AddedToken("é")),
    ],
)
def test_a_decoder_that_is_no_inverse_loses_nothing(tokenizer: Tokenizer) -> None:
    assert measured(tokenizer, ALL) == ({}, 0)


def test_bytes_stand_for_characters_without_a_token() -> None:
    assert measured(byte_fallback(), ALL.replace("▁", "")) == ({}, 0)
    assert measured(byte_fallback(), "a▁b") == ({"replaced": 1}, 0)  # which comes back as a space


@pytest.mark.parametrize(
    ("tokenizer", "text", "kinds", "num_bytes"),
    [
        (bpe(pre_tokenizer=pre_tokenizers.Split(" ", "isolated")), "aбb бalpha бб x", {"no_token": 5}, 9),
        (bpe(("<unk>", "<eos>"), model=models.BPE(unk_token="<unk>")), "aбb бalpha x", {"no_token": 3}, 5),
        (bpe(pre_tokenizer=pre_tokenizers.ByteLevel(), vocab_size=60), "a é b", {"no_token": 1}, 2),
        (unigram(), "alpha бб ббeta", {"no_token": 4}, 8),
        (unigram(normalizer=normalizers.Lowercase()), "Alpha GAMMA", {"case": 6}, 0),
        (unigram(normalizer=normalizers.NFKC()), "ﬁ ① alpha", {"compatibility": 2}, 0),
        (unigram(normalizer=normalizers.Replace("\n", " ")), "alpha\nbeta", {"white_space": 1}, 0),
        (word_piece(), "Alpha, beta", {"case": 1}, 1),  # the space between words is implied
        (word_piece(), "alpha  \n beta", {"white_space": 4}, 4),
        (word_piece(lowercase=False, strip_accents=True), "béta", {"replaced": 1}, 0),
        (word_piece(), "alphaб beta", {"no_token": 6}, 8),  # a word is unknown as a whole
        (byte_level(normalizer=normalizers.Strip(), decoder=decoders.ByteLevel()), " alpha\n", {"white_space": 2}, 2),
        (byte_level(normalizer=normalizers.Replace(Regex(" {2,}"), " ")), "a    b", {"white_space": 3}, 3),
        (word_piece(), "a\n\nb\n", {"white_space": 3}, 3),  # changed by the normaliser and then left out
        (word_piece(), "한국어", {"no_token": 3}, 9),  # which the normaliser takes apart
        (with_added(word_piece(), AddedToken("[E1]", normalized=False)), "a [E1] B", {"case": 1}, 2),
    ],
)
def test_lost_text_is_told_by_kind(tokenizer: Tokenizer, text: str, kinds: dict[str, int], num_bytes: int) -> None:
    assert measured(tokenizer, text) == (kinds, num_bytes)


def test_the_sentence_names_kinds_and_characters_and_normalisation_apart() -> None:
    tokenizer = unigram(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]))
    loss = Speller(tokenizer).measure("Alpha бб ﬁ" + " alpha" * 15)
    assert describe_lost_text(loss.as_json()) == (
        "3 % of characters do not come back (2 have no token; 1 become lower case; most often 'б' 'A'); "
        "of 100 characters, 1 are written in another form"
    )
    assert describe_lost_text(Speller(tokenizer).measure("alpha").as_json()) == ""
