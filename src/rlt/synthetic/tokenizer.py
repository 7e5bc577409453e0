"""A tokenizer for a synthetic checkpoint: every id but the padding rows is a token, and any text can be encoded.

Text is encoded byte by byte, since there is nothing to learn merges from; the other tokens are words made of syllables,
so that what a model generates has the length of ordinary text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from rlt.synthetic.shapes import Tokens

#: A leading space as byte-level tokenizers spell it.
_SPACE = "Ġ"
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]


def write_tokenizer(directory: Path, tokens: Tokens, positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; `positions` is the longest text in tokens."""
    by_id = {token_id: token for token, token_id in tokens.special.items()}
    words = _words()
    vocabulary = {by_id.get(token_id) or next(words): token_id for token_id in range(tokens.known)}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, token in sorted(by_id.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens.bos,
        "eos_token": tokens.eos,
        "pad_token": tokens.pad,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
        "chat_template": tokens.template,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _words() -> Iterator[str]:
    """The byte alphabet, then words that are all different."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    yield from map(chr, printable)
    yield from (chr(0x100 + index) for index in range(256 - len(printable)))
    for number in count(len(_SYLLABLES)):
        word, rest = "", number
        while rest:
            rest, digit = divmod(rest, len(_SYLLABLES))
            word = _SYLLABLES[digit] + word
        yield _SPACE + word
