"""A checkpoint's tokenizer: text to ids, and ids to bytes one by one, which is what streaming needs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from rlt.errors import ModelError
from rlt.text.tags import TAGS

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ModelError):
    """The tokenizer's files cannot be used, or an id is not one of its tokens."""


class _Decoding(NamedTuple):
    """How a tokenizer's pieces become bytes, read from the decoder of its tokenizer.json."""

    #: pieces are spelled in the byte alphabet of GPT-2
    byte_level: bool = False
    #: the character that stands for a space
    space: str = ""
    #: `<0xNN>` stands for one byte
    byte_tokens: bool = False
    #: leading spaces that the start of a text loses
    strip_start: int = 0
    #: the start of a text loses every space mark of its first piece, instead of `strip_start`
    strip_first_piece: bool = False
    #: put between pieces (tokenizers without a decoder join with spaces)
    joint: bytes = b""


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`; safe to use from several threads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        settings = json.loads(inner.to_str())
        self._decoding = _read_decoding(settings.get("decoder"))
        self._widest = _widest_token(settings, self._decoding)
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special and token.content not in TAGS)
        self._pieces: dict[int, bytes] = {}

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are left out of a text, unless asked for."""
        return self._special

    @property
    def joint(self) -> bytes:
        """The bytes between two pieces of a text."""
        return self._decoding.joint

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Other threads run meanwhile."""
        # Of the library's ways to encode, only those for batches release the interpreter lock; this one also leaves
        # out the offsets, which nobody asks for.
        return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without encoding it; 0 when nothing is certain."""
        return 0 if self._widest is None else -(-len(text.encode()) // self._widest)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its own spelling."""
        return self._inner.token_to_id(token)

    def has(self, token_id: int) -> bool:
        """Whether there is such a token. A model's vocabulary may be padded beyond its tokenizer's."""
        if token_id in self._pieces:
            return True
        return 0 <= token_id < 1 << 32 and self._inner.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds in the middle of a text. Raises `TokenizerError` for an id without a token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._spell(self._token(token_id))
        return piece

    def first_bytes(self, token_id: int) -> tuple[bytes, bool]:
        """The bytes of a token at the start of a text, and whether the next token still stands at the start."""
        decoding = self._decoding
        if decoding.strip_first_piece:
            return self._spell(self._token(token_id).replace(decoding.space, "")), False
        piece = self.token_bytes(token_id)
        strip = decoding.strip_start
        for _ in range(strip):
            piece = piece.removeprefix(b" ")
        return piece, strip > 0 and not self.token_bytes(token_id)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence, as the library's own `decode`; what is no UTF-8 becomes U+FFFD."""
        shown = [i for i in token_ids if not (skip_special_tokens and i in self._special)]
        pieces: list[bytes] = []
        at_start = True
        for token_id in shown:
            if at_start:
                piece, at_start = self.first_bytes(token_id)
            else:
                piece = self.token_bytes(token_id)
            pieces.append(piece)
        return self._decoding.joint.join(pieces).decode("utf-8", errors="replace")

    def _token(self, token_id: int) -> str:
        token = self._inner.id_to_token(token_id)
        if token is None:
            raise TokenizerError(f"token id {token_id} is not in the tokenizer")
        return token

    def _spell(self, token: str) -> bytes:
        decoding = self._decoding
        if decoding.byte_level:
            # A token with a character outside the alphabet (an added token) stands for itself.
            spelled = [_BYTE_ALPHABET.get(char) for char in token]
            known = [byte for byte in spelled if byte is not None]
            return bytes(known) if len(known) == len(spelled) else token.encode()
        if decoding.byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        return token.replace(decoding.space, " ").encode() if decoding.space else token.encode()


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None when it has none: such a model serves token-id prompts only."""
    path = directory / TOKENIZER_FILE
    if path.is_file():
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise TokenizerError(f"{path}: cannot be read: {error}") from error
        # Settings of a training run; a served prompt is never cut or filled up.
        inner.no_truncation()
        inner.no_padding()
    elif (directory / SENTENCEPIECE_FILE).is_file():
        inner = _convert_sentencepiece(directory)
    else:
        return None
    try:
        return Tokenizer(inner)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error


def _convert_sentencepiece(directory: Path) -> tokenizers.Tokenizer:
    """Let transformers convert a SentencePiece model; slow, and only for checkpoints without a tokenizer.json."""
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(str(directory), use_fast=True).backend_tokenizer
    except (ImportError, OSError, ValueError, AttributeError) as error:
        raise TokenizerError(
            f"{directory / SENTENCEPIECE_FILE}: cannot be converted ({error}); install sentencepiece, or save a "
            f"{TOKENIZER_FILE} beside it"
        ) from error
    assert isinstance(inner, tokenizers.Tokenizer)
    return inner


def _widest_token(settings: Mapping[str, Any], decoding: _Decoding) -> int | None:
    """Most bytes of text that one token can stand for; None when that has no limit.

    There is one only if no step drops or joins text: BPE that knows every byte, behind steps that only split, put
    something in, or compose characters. Tokens for unknown words, stripped spaces and the like take in any length.
    """
    model, added = settings["model"], settings["added_tokens"]
    pieces: Mapping[str, int] = model["vocab"] if model["type"] == "BPE" else {}
    steps = _steps(settings["normalizer"], "normalizers") + _steps(settings["pre_tokenizer"], "pretokenizers")
    if any(step["type"] == "ByteLevel" for step in steps):
        complete = decoding.byte_level and pieces.keys() >= _BYTE_ALPHABET.keys()
    else:
        complete = bool(model.get("byte_fallback")) and pieces.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    if not complete or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    # Each character of a byte-level piece is one byte of the text.
    widest = max(len(piece) if decoding.byte_level else len(piece.encode()) for piece in pieces)
    widest = max(widest, *(len(token["content"].encode()) for token in added), 1)
    for step in steps:
        match step:
            case {"type": "NFC"}:
                # A character of 2 bytes can come from 3 characters of 3 bytes each.
                widest *= 5
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new.encode()) < len(old.encode()):
                    return None
            case {"type": "Split", "behavior": behavior} if behavior != "Removed":
                pass
            case {"type": "ByteLevel" | "Digits" | "Metaspace" | "Prepend"}:
                pass
            case _:
                return None
    return widest


def _steps(step: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return step[members] if step["type"] == "Sequence" else [step]


def _read_decoding(decoder: dict[str, Any] | None) -> _Decoding:
    if decoder is None:
        return _Decoding(joint=b" ")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    decoding = _Decoding()
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                decoding = decoding._replace(byte_level=True)
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "}:
                decoding = decoding._replace(space=mark)
            case {"type": "ByteFallback"}:
                decoding = decoding._replace(byte_tokens=True)
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                decoding = decoding._replace(strip_start=start)
            case {"type": "Metaspace", "replacement": str(mark)}:
                strips = step.get("prepend_scheme", "always") != "never"
                decoding = decoding._replace(space=mark, strip_first_piece=strips)
            case {"type": "Fuse"}:
                pass
            case _:
                raise TokenizerError(f"decoder {json.dumps(step, ensure_ascii=False)} is not supported")
    return decoding


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: those that are printable stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()
