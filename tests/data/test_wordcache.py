"""Long documents are encoded in parts, which are cut where no word can reach across."""

import pytest

from llmfoundry_lite.data import wordcache


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ab cd  ef", ["ab", " cd", "  ef"]),  # a space belongs to the word after it
        ("ab\ncd", ["ab", "\ncd"]),
        ("ab漢 cd", ["ab漢 cd"]),  # a character of which it is not known what it joins
        ("abcd", ["abcd"]),
    ],
)
def test_a_document_is_cut_before_a_space_after_a_known_character(monkeypatch, text, parts):
    monkeypatch.setattr(wordcache, "SLICE_CHARACTERS", 1)
    assert list(wordcache.slices(text)) == parts
