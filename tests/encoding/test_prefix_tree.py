"""n-grams: prefixes, END, OOV, and the same indices from salted hashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chorister.encoding import DenyList, PrefixTree
from chorister.errors import InvalidInput

TREE = PrefixTree(
    column="ngram",
    prefixes=("hello world", "how are", "i got"),
    vocabulary=("a", "all", "home", "it", "the", "to", "up", "world", "you"),
)
FIRST = PrefixTree(column="word", prefixes=("",), vocabulary=("hello", "you"))
SALT = bytes(range(16))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("hello world", "hello world END"),
        ("Hello, WORLD!", "hello world END"),
        ("hello world zebra", "hello world OOV"),
        ("how are you", "how are you"),
        ("how are you today", "how are you"),
        ("i got world", "i got world"),
        ("hello", "OOV"),
        ("hello there world", "OOV"),
        ("how", "OOV"),
        ("so how are you", "OOV"),
        ("", "OOV"),
        (None, "OOV"),
        (7, "OOV"),
        (b"how are you", "OOV"),
        (float("nan"), "OOV"),
    ],
)
def test_trigrams(text: object, label: str) -> None:
    for tree in (TREE, TREE.hashed(SALT)):
        index = TREE.index(label)
        assert tree.find([text]) == [index]
        assert tree.find(["i got up", text, None]) == [TREE.index("i got up"), index, 0]
    assert TREE.label(TREE.index(label)) == label


def test_the_order_is_the_papers() -> None:
    labels = [TREE.label(i) for i in range(5)]
    assert labels == [
        "OOV",
        "hello world END",
        "hello world OOV",
        "hello world a",
        "hello world all",
    ]
    assert TREE.label(TREE.size - 1) == "i got you"


@pytest.mark.parametrize(
    ("text", "label"),
    [("Hello", "hello"), ("you two", "you"), ("me", "* OOV"), ("", "* END"), (None, "OOV")],
)
def test_first_words(text: object, label: str) -> None:
    assert FIRST.label(int(FIRST.find([text])[0])) == label
    assert FIRST.hashed(SALT).find([text]) == FIRST.find([text])


def test_prefixes_of_several_lengths() -> None:
    tree = PrefixTree(column="x", prefixes=("a b", "c"), vocabulary=("d",))
    texts = ["a b d", "c d", "c", "a d", "a b", "c x"]
    labels = [tree.label(int(i)) for i in tree.find(texts)]
    assert labels == ["a b d", "c d", "c END", "OOV", "a b END", "c OOV"]
    assert tree.hashed(SALT).find(texts) == tree.find(texts)


WORDS = st.sampled_from(["hello", "world", "how", "are", "i", "got", "you", "up", "Zebra", "don't"])


@given(st.lists(st.lists(WORDS, max_size=6).map(" ".join), max_size=20))
def test_hashed_and_plain_agree_with_a_slow_reading(texts: list[str]) -> None:
    def slowly(text: str) -> str:
        words = text.lower().split()
        for prefix in TREE.prefixes:
            p = prefix.split()
            if words[: len(p)] == p:
                rest = words[len(p) : len(p) + 1]
                last = "END" if not rest else rest[0] if rest[0] in TREE.vocabulary else "OOV"
                return f"{prefix} {last}"
        return "OOV"

    expected = [TREE.index(slowly(text)) for text in texts]
    assert TREE.find(texts) == expected
    assert TREE.hashed(SALT).find(texts) == expected


def test_hashes_hide_the_words_and_depend_on_the_salt() -> None:
    hashed = TREE.hashed(SALT)
    assert "hello" not in hashed.model_dump_json()
    assert set(hashed.prefixes).isdisjoint(TREE.hashed(bytes(16)).prefixes)
    assert hashed.size == TREE.size
    assert [hashed.index(hashed.label(i)) for i in range(hashed.size)] == list(range(hashed.size))
    with pytest.raises(InvalidInput, match="16 bytes"):
        TREE.hashed(b"short")


def test_a_hash_is_pinned() -> None:
    """SHA-256(salt || "how are"), first 16 bytes: another implementation must find the same."""
    assert TREE.hashed(SALT).prefixes[1] == "a8c5893e37884b500e60404a4dd834f8"


@pytest.mark.parametrize(
    ("prefixes", "vocabulary", "words"),
    [
        (("Hello",), ("a",), "write 'hello'"),
        (("hello  world",), ("a",), "canonical"),
        (("a", "a"), ("b",), "twice"),
        (("a", "a b"), ("c",), "begins"),
        (("", "a"), ("b",), "the only one"),
        (("a",), ("b", "b"), "twice"),
        (("a",), ("b c",), "one word"),
        (("a",), ("",), "one word"),
        ((), ("a",), "at least 1"),
        (("a b c d e f g h i",), (), "more than 8 words"),
    ],
)
def test_trees_that_make_no_sense(
    prefixes: tuple[str, ...], vocabulary: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        PrefixTree(column="x", prefixes=prefixes, vocabulary=vocabulary)


@pytest.mark.parametrize("label", ["", "END", "* OOV", "hello world zebra", "hello world", "a b"])
def test_unknown_labels(label: str) -> None:
    with pytest.raises(InvalidInput):
        TREE.index(label)


@pytest.mark.parametrize("label", ["", "END", "* hello", "*", "hello world"])
def test_unknown_labels_of_first_words(label: str) -> None:
    with pytest.raises(InvalidInput):
        FIRST.index(label)


def test_deny_lists_match_whole_words() -> None:
    deny = DenyList(column="x", phrases=("bad", "very rude"))
    texts: list[Any] = [
        "Bad idea",
        "badge",
        "very RUDE word",
        "very not rude",
        None,
        3,
        "",
        "so bad",
    ]
    assert deny.denied(texts) == [True, False, True, False, False, False, False, True]


@pytest.mark.parametrize("phrases", [(), ("Bad",), ("",), ("a", "a"), ("a  b",)])
def test_deny_lists_that_make_no_sense(phrases: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        DenyList(column="x", phrases=phrases)
