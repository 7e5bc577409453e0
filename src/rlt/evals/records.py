"""The record of an evaluation: a JSON-lines file that says what was asked how, and what came of each question.

Its first line has the settings; each further line is one question's record. A question that was asked again has
several lines, of which the last one counts. The file is written line by line, so an evaluation that was stopped goes on
where it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import msgspec

from rlt.errors import ConfigError

#: how every record file begins, even one that was cut off in its first line
_MARK = b'{"record":"rlt eval gsm8k",'


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    record: Literal["rlt eval gsm8k"]
    #: of the file's form
    version: Literal[1]
    settings: dict[str, Any]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question and what came of it. With an `error`, what follows it is empty and nothing was scored."""

    id: int
    #: of the prompt as it was sent
    prompt_hash: str
    gold: str
    error: str | None = None
    text: str = ""
    #: what the server split off as reasoning, if it does
    reasoning: str | None = None
    #: the numbers found, and whether they are right
    strict: str | None = None
    strict_correct: bool = False
    flexible: str | None = None
    flexible_correct: bool = False
    #: None where the answerer does not tell; loops are the sum over the tokens
    tokens: int | None = None
    loops: int | None = None
    mean_loops: float | None = None
    finish_reason: str | None = None


def digest(value: object) -> str:
    """A short hash of a JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RecordFile:
    """The records at `path` (None: kept in memory only), made with `settings`, to be used in a `with` statement.

    Raises `ConfigError` when the file there was made with other settings, is no such file, or is in use.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        #: by question
        self.records: dict[int, Record] = {}
        self._file: IO[bytes] | None = None
        if path is None:
            return
        # As a file gives them back, where tuples are lists.
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError([f"--record: {path}: {error.strerror}"]) from error
        try:
            self._go_on(path, plain)
        except BaseException:
            self._file.close()
            raise

    def _go_on(self, path: Path, settings: dict[str, Any]) -> None:
        """Take in what the file has, and make it ready for more."""
        assert self._file is not None
        try:
            # Two runs would cut off each other's lines. The lock goes with the file, however the run ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = self._read(path, settings)
            # The part of a line that a stopped run left goes.
            self._file.truncate(kept)
        except BlockingIOError as error:
            raise ConfigError([f"--record: {path} is in use by another run"]) from error
        except OSError as error:
            raise ConfigError([f"--record: {path}: {error.strerror}"]) from error
        if not kept:
            self._write(Head("rlt eval gsm8k", 1, settings))

    def add(self, record: Record) -> None:
        self.records[record.id] = record
        self._write(record)

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: Head | Record) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()

    def _read(self, path: Path, settings: dict[str, Any]) -> int:
        """Take in the file's records; the number of bytes of its whole lines."""
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        lines = content[:end].splitlines()
        if not content.startswith(_MARK[: len(content)]):
            raise _no_record(path, 1)
        for number, line in enumerate(lines, 1):
            try:
                if number == 1:
                    _check(path, msgspec.json.decode(line, type=Head).settings, settings)
                else:
                    record = msgspec.json.decode(line, type=Record)
                    self.records[record.id] = record
            except msgspec.DecodeError as error:
                raise _no_record(path, number) from error
        return end


def _no_record(path: Path, line: int) -> ConfigError:
    return ConfigError([f"--record: {path}, line {line}: is no record of an evaluation; give another file"])


def _check(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        parts = [f"{key} was {_short(before.get(key))} and is {_short(now.get(key))}" for key in changed]
        raise ConfigError(
            [f"--record: {path} was made with other settings: {'; '.join(parts)}. Give these again, or another file"]
        )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
