from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, processors

from rlt.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from text import small_tokenizers as samples

KINDS = [samples.byte_level, samples.sentencepiece, samples.metaspace, samples.word_level]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def pair(request: pytest.FixtureRequest) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    build: Callable[[], tokenizers.Tokenizer] = request.param
    inner = build()
    return inner, Tokenizer(inner)


BYTE_LEVEL = samples.byte_level()
SENTENCEPIECE = samples.sentencepiece()
WORDS = samples.word_level()
METASPACE = samples.metaspace()
OURS = {id(inner): Tokenizer(inner) for inner in (BYTE_LEVEL, SENTENCEPIECE, WORDS, METASPACE)}


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), st.booleans())
@settings(deadline=None)
def test_any_ids_of_a_byte_level_tokenizer_decode_as_the_library_does(ids: list[int], skip: bool) -> None:
    assert OURS[id(BYTE_LEVEL)].decode(ids, skip_special_tokens=skip) == BYTE_LEVEL.decode(
        ids, skip_special_tokens=skip
    )


def _ids_of_texts(inner: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids whose byte tokens always form whole characters, mixed with every other kind of token."""
    text = st.text("abé日🎉 hworld<>!", max_size=8).map(lambda text: inner.encode(text).ids)
    pieces = [i for i in range(inner.get_vocab_size()) if not (inner.id_to_token(i) or "").startswith("<0x")]
    single = st.sampled_from(pieces).map(lambda i: [i])
    return st.lists(text | single, max_size=12).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("inner", [SENTENCEPIECE, METASPACE, WORDS], ids=["sentencepiece", "metaspace", "words"])
@given(data=st.data(), skip=st.booleans())
@settings(deadline=None)
def test_other_tokenizers_decode_as_the_library_does(
    inner: tokenizers.Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(_ids_of_texts(inner))
    assert OURS[id(inner)].decode(ids, skip_special_tokens=skip) == inner.decode(ids, skip_special_tokens=skip)


def test_text_comes_back(pair: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    inner, tokenizer = pair
    text = "one two" if "one" in inner.get_vocab() else "hello world"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == inner.encode(text).ids


def test_special_tokens_are_hidden_unless_asked_for(pair: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    _, tokenizer = pair
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    assert end in tokenizer.special_ids
    assert tokenizer.decode([end]) == ""
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|end|>"


def test_tags_are_shown_even_where_the_tokenizer_calls_them_special() -> None:
    inner = samples.byte_level()
    inner.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|other|>"])
    text = "<think>a</think>b<tool_call>c</tool_call><|other|>"
    tokenizer = Tokenizer(inner)
    assert tokenizer.decode(tokenizer.encode(text)) == text.removesuffix("<|other|>")


@pytest.mark.parametrize("token_id", [10_000, 1 << 20])
def test_an_id_without_a_token_is_an_error(pair: tuple[tokenizers.Tokenizer, Tokenizer], token_id: int) -> None:
    with pytest.raises(TokenizerError, match=f"token id {token_id}"):
        pair[1].token_bytes(token_id)
    assert not pair[1].has(token_id)
    assert pair[1].has(3)


def test_byte_tokens_are_bytes() -> None:
    tokenizer = Tokenizer(SENTENCEPIECE)
    token_id = tokenizer.token_id("<0xE2>")
    assert token_id is not None
    assert tokenizer.token_bytes(token_id) == b"\xe2"


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_loading_drops_truncation_and_padding(tmp_path: Path) -> None:
    inner = samples.byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("hello world, hello there!")) == "hello world, hello there!"


def test_a_broken_file_names_itself(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(tmp_path)


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    inner = samples.byte_level()
    inner.decoder = decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_file_that_cannot_be_converted_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


@given(st.text("abé日🎉 hworld<>!|end\n\u0301", max_size=30), st.booleans())
@settings(deadline=None)
def test_encoding_is_the_librarys_own(text: str, special: bool) -> None:
    for inner in (BYTE_LEVEL, SENTENCEPIECE, WORDS, METASPACE):
        got = OURS[id(inner)].encode(text, add_special_tokens=special)
        assert got == inner.encode(text, add_special_tokens=special).ids


def test_encoding_adds_the_tokens_of_the_post_processor() -> None:
    inner = samples.byte_level()
    inner.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer = Tokenizer(inner)
    for text in ("hello", "hello<|user|>hello", ""):
        for special in (True, False):
            ids = inner.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special) == ids
            assert (ids[:1] == [0]) is special


def _composing() -> tokenizers.Tokenizer:
    inner = samples.byte_level()
    inner.normalizer = normalizers.NFC()
    return inner


COMPOSING = Tokenizer(_composing())


@given(st.text("abé日🎉 hworld\n\u0301\u0390\u1fbe\u0308\u0341\u212a\u1fef", max_size=60))
@settings(deadline=None)
def test_a_text_has_at_least_the_tokens_that_are_certain(text: str) -> None:
    for tokenizer in (OURS[id(BYTE_LEVEL)], OURS[id(SENTENCEPIECE)], COMPOSING):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_certain_tokens_come_from_the_longest_piece() -> None:
    longest = max(len(Tokenizer(BYTE_LEVEL).token_bytes(i)) for i in range(BYTE_LEVEL.get_vocab_size()))
    text = "1" * 1000
    assert OURS[id(BYTE_LEVEL)].fewest_tokens(text) == -(-1000 // longest)
    assert OURS[id(SENTENCEPIECE)].fewest_tokens(text) > 50
    assert COMPOSING.fewest_tokens("") == 0


def _changed(change: Callable[[tokenizers.Tokenizer], object]) -> tokenizers.Tokenizer:
    inner = samples.byte_level()
    change(inner)
    return inner


@pytest.mark.parametrize(
    "inner",
    [
        WORDS,
        METASPACE,
        _changed(lambda inner: setattr(inner, "normalizer", normalizers.Strip())),
        _changed(lambda inner: setattr(inner, "normalizer", normalizers.Replace("  ", " "))),
        _changed(lambda inner: setattr(inner, "normalizer", normalizers.Replace(tokenizers.Regex(" +"), " "))),
        _changed(lambda inner: inner.add_tokens([tokenizers.AddedToken("<s>", lstrip=True)])),
    ],
)
def test_nothing_is_certain_where_a_token_can_take_in_any_text(inner: tokenizers.Tokenizer) -> None:
    assert Tokenizer(inner).fewest_tokens(" " * 100_000) == 0
