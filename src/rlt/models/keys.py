"""Reading a checkpoint's JSON file key by key, so that nothing in it is guessed, overlooked or half understood."""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from typing import Any

from rlt.models.directory import read_json


class Keys:
    """Takes the keys of a JSON file one by one and collects what is wrong; what is left at the end is unknown.

    After a problem the methods return a value of the right type, so that the rest of the file is checked too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = read_json(path)
        self._known: set[str] = set()
        self._problems: list[str] = []

    def problem(self, text: str) -> None:
        self._problems.append(f"{self.path}: {text}")

    def take(self, key: str) -> Any:
        """The value of a key, or None."""
        self._known.add(key)
        return self._data.get(key)

    def integer(self, key: str, low: int, default: int | None = None) -> int:
        """An integer of at least `low`; a null or absent key is an error unless there is a `default`."""
        value = self.take(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= low:
            return value
        self._wrong(key, value, f"an integer of at least {low}")
        return low

    def number(
        self, key: str, low: float, high: float = math.inf, default: float | None = None, above: bool = False
    ) -> float:
        """A finite number from `low` (excluded if `above`) to `high`."""
        value = self.take(key)
        if value is None and default is not None:
            return default
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if good and (low < value if above else low <= value) and value <= high:
            return float(value)
        end = "" if high == math.inf else f" and at most {high:g}"
        self._wrong(key, value, f"a number {'above' if above else 'of at least'} {low:g}{end}")
        return 1.0

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.take(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
            return tuple(ids)
        self._wrong(key, value, f"null or ids below vocab_size ({vocab_size})")
        return ()

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """An id or nothing."""
        ids = self.token_ids(key, vocab_size)
        if len(ids) > 1:
            self._wrong(key, list(ids), "one id or null")
        return ids[0] if ids else None

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of some words."""
        value = self.take(key)
        if value in choices:
            return str(value)
        self._wrong(key, value, f"one of {', '.join(choices)}")
        return choices[0]

    def only(self, key: str, *accepted: Any) -> None:
        """A key that may be absent or null, and otherwise must say what the engine does anyway."""
        value = self.take(key)
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted
        ):
            self.problem(
                f"{key} {spelled(value)} is not supported; must be {' or '.join(map(spelled, accepted)) or 'null'}"
            )

    def off(self, *names: str) -> None:
        """Switches of variants that the engine does not compute: absent, or at a value that means nothing is on."""
        for name in names:
            value = self.take(name)
            if value not in (None, False, 0, []):
                self.problem(f"{name} {spelled(value)} is not supported; must be null, false, 0 or []")

    def harmless(self, *names: str) -> None:
        """Keys whose value changes nothing here."""
        self._known.update(names)

    def finish(self) -> list[str]:
        """All problems, with a line for every key that nobody took."""
        for key in self._data:
            if key not in self._known:
                close = difflib.get_close_matches(key, self._known, n=1, cutoff=0.6)
                hint = f"; did you mean {close[0]}?" if close else ""
                self.problem(f"unknown key {key}{hint}")
        return self._problems

    def _wrong(self, key: str, value: Any, wanted: str) -> None:
        if key in self._data:
            self.problem(f"{key} must be {wanted}, got {spelled(value)}")
        else:
            self.problem(f"{key} is missing; it must be {wanted}")


def spelled(value: Any) -> str:
    """A value as the file spells it."""
    return json.dumps(value, ensure_ascii=False)
