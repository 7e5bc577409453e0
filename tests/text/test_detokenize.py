from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.text.detokenize import IncrementalText
from rlt.text.tokenizer import Tokenizer, TokenizerError
from text import small_tokenizers as samples

TOKENIZER = Tokenizer(samples.byte_level())
VOCAB = samples.byte_level().get_vocab_size()


def byte_ids(data: bytes) -> list[int]:
    """One token per byte."""
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(VOCAB)}
    return [by_byte[bytes([byte])] for byte in data]


def run(text: IncrementalText, chunks: list[list[int]]) -> tuple[str, str | None, int]:
    """The whole text, the stop string and the number of tokens consumed."""
    whole, consumed = "", 0
    for chunk in chunks:
        piece = text.feed(chunk)
        whole, consumed = whole + piece.text, consumed + piece.consumed
        if piece.stop is not None:
            return whole, piece.stop, consumed
    piece = text.finish()
    return whole + piece.text, piece.stop, consumed


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def oracle(ids: list[int], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """Search the whole text after every character; slow and simple."""
    whole = TOKENIZER.decode(ids)
    ends = {}
    for count in range(1, len(ids) + 1):
        data = b"".join(TOKENIZER.token_bytes(i) for i in ids[:count] if i not in TOKENIZER.special_ids)
        # A character belongs to the token that makes it certain.
        known = len(_complete(data)) if count < len(ids) else len(whole)
        for end in range(len(ends) + 1, known + 1):
            ends[end] = count
    for end in range(1, len(whole) + 1):
        hits = [stop for stop in stops if whole[:end].endswith(stop)]
        if hits and ends[end] > min_tokens:
            stop = max(hits, key=len)
            return whole[: end if include else end - len(stop)], stop, ends[end]
    return whole, None, len(ids)


def _complete(data: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.lists(st.integers(0, 40), max_size=5))
@settings(deadline=None)
def test_any_split_of_any_ids_gives_the_text_of_the_whole(ids: list[int], cuts: list[int]) -> None:
    assert run(IncrementalText(TOKENIZER), split(ids, cuts))[0] == TOKENIZER.decode(ids)


@given(
    st.tuples(st.text("ab€", max_size=24), st.binary(max_size=2)).map(lambda parts: parts[0].encode() + parts[1]),
    st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=6),
    st.booleans(),
    st.integers(0, 12),
)
@settings(deadline=None, max_examples=400)
def test_stop_strings_match_as_in_the_whole_text(
    data: bytes, stops: list[str], cuts: list[int], include: bool, min_tokens: int
) -> None:
    ids = byte_ids(data)
    options = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    assert run(IncrementalText(TOKENIZER, **options), split(ids, cuts)) == oracle(ids, stops, include, min_tokens)  # type: ignore[arg-type]


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=2, max_size=5), min_size=1, max_size=3))
@settings(deadline=None)
def test_text_is_held_only_while_it_can_become_a_stop_string(text: str, stops: list[str]) -> None:
    stream = IncrementalText(TOKENIZER, stop=stops)
    given_text, left = "", ""
    for token_id in byte_ids(text.encode()):
        piece = stream.feed([token_id])
        if piece.stop is not None:
            return
        given_text += TOKENIZER.token_bytes(token_id).decode()
        left += piece.text
        held = given_text[len(left) :]
        assert given_text.startswith(left)
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer = [given_text[i:] for i in range(len(left))]
        assert not any(stop.startswith(rest) for rest in longer for stop in stops)


def test_a_character_leaves_when_it_is_whole() -> None:
    stream = IncrementalText(TOKENIZER)
    pieces = [stream.feed([i]).text for i in byte_ids("€!".encode())]
    assert pieces == ["", "", "€", "!"]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    stream = IncrementalText(TOKENIZER)
    assert stream.feed(byte_ids("a€".encode()[:-1])).text == "a"
    assert stream.finish().text == "\N{REPLACEMENT CHARACTER}"


def test_tokens_after_the_stop_string_are_not_consumed() -> None:
    piece = IncrementalText(TOKENIZER, stop=["b"]).feed(byte_ids(b"abc"))
    assert piece == ("a", 2, "b")


def test_the_answer_completes_the_last_character_of_the_prompt() -> None:
    euro = byte_ids("€".encode())
    assert run(IncrementalText(TOKENIZER, prompt_tail=euro[:2]), [euro[2:]])[0] == "€"
    assert run(IncrementalText(TOKENIZER, prompt_tail=euro[:2]), [[], byte_ids(b"a")])[0] == "a"
    assert run(IncrementalText(TOKENIZER, prompt_tail=euro[:2]), [])[0] == ""


def test_an_id_of_the_prompt_without_a_token_does_not_matter() -> None:
    assert run(IncrementalText(TOKENIZER, prompt_tail=[VOCAB + 5]), [byte_ids(b"a")])[0] == "a"


def test_leading_space_stays_after_a_prompt() -> None:
    tokenizer = Tokenizer(samples.sentencepiece())
    ids = [i for word in ("▁hello", "▁world") if (i := tokenizer.token_id(word)) is not None]
    assert run(IncrementalText(tokenizer), [ids])[0] == "hello world"
    assert run(IncrementalText(tokenizer, prompt_tail=ids), [ids])[0] == " hello world"


def test_words_without_a_decoder_are_joined_with_spaces() -> None:
    tokenizer = Tokenizer(samples.word_level())
    ids = tokenizer.encode("one two three")
    assert run(IncrementalText(tokenizer, prompt_tail=[3]), [[i] for i in ids])[0] == "one two three"


def test_special_tokens_are_shown_when_asked_for() -> None:
    end = TOKENIZER.token_id("<|end|>")
    assert end is not None
    assert IncrementalText(TOKENIZER).feed([end]).text == ""
    assert IncrementalText(TOKENIZER, skip_special_tokens=False).feed([end]).text == "<|end|>"


def test_without_a_tokenizer_there_are_ids_only() -> None:
    stream = IncrementalText(None, stop=["a"])
    assert stream.feed([1, 2]) == ("", 2, None)
    assert stream.finish() == ("", 0, None)


def test_an_id_without_a_token_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="token id 9999"):
        IncrementalText(TOKENIZER).feed([9999])
