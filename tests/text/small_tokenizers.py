"""Small tokenizers of every kind that is served, built on the spot."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["hello world, hello there!", "wörld €5 日本語 🎉", "the stop string STOP ends it", "a b c  d   e"] * 3
SPECIAL = ["<|end|>", "<|user|>"]


def byte_level() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens(["\n\n", "é é"])
    return inner


def sentencepiece(*, byte_fallback: bool = True) -> tokenizers.Tokenizer:
    words = ["▁hello", "▁world", "hello", "world", "▁", "▁▁", "lo", "é", "日本", "<0x", "STOP", "▁S", "TOP", "!"]
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *map(chr, range(0x61, 0x7B))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True, ignore_merges=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(SPECIAL)
    return inner


def metaspace() -> tokenizers.Tokenizer:
    inner = sentencepiece(byte_fallback=False)
    inner.normalizer = normalizers.Sequence([])
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return inner


def word_level() -> tokenizers.Tokenizer:
    words = [*SPECIAL, "<unk>", "one", "two", "three", "+", "="]
    inner = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(SPECIAL)
    return inner
