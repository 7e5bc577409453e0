"""Settings as they are written: TOML files, `--set` assignments, and the check of one value."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

from rlt.errors import ConfigError


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The tables of a TOML file, and its text. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text), text
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: is not valid TOML: {error}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{path}: is nested too deeply"]) from error


def parse_assignment(text: str, problems: list[str]) -> dict[str, Any] | None:
    """`section.key=value` as nested tables; None after adding to `problems`."""
    if len(text.splitlines()) > 1:
        problems.append(f"--set {text!r}: must be one line; give --set once for each key")
        return None
    key, equals, literal = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not name:
        problems.append(f"--set {text}: expected section.key=value")
        return None
    try:
        value = tomllib.loads(f"value = {literal}")["value"]
    except tomllib.TOMLDecodeError:
        value = literal.strip()
    except RecursionError:
        problems.append(f"--set {section}.{name}: is nested too deeply")
        return None
    return {section: {name: value}}


def converted(value: Any, hint: Any) -> Any:
    """A checked value as the field has it: TOML has no tuples, and writes whole numbers without a point."""
    if isinstance(value, list):
        return tuple(value)
    return float(value) if hint in (float, float | None) and value is not None else value


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """The end of an error: the known name that was probably meant, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def where_is(origin: str, toml_text: str, section: str, key: str | None) -> str:
    """`file:line` of a key, found by reading the text, since tomllib keeps no positions."""
    if not toml_text:
        return origin
    current = ""
    for number, line in enumerate(toml_text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)
        if header:
            current = header.group(1).strip("\"'")
            if key is None and current == section:
                return f"{origin}:{number}"
            continue
        name = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if name is None:
            continue
        full = name.group(1).replace('"', "").replace("'", "")
        path = f"{current}.{full}" if current else full
        if path == f"{section}.{key}" or (key is None and path.split(".")[0] == section) or path == section:
            return f"{origin}:{number}"
    return origin


def check_value(value: Any, hint: Any, bounds: Mapping[str, Any]) -> str | None:
    """Say what is wrong with `value` for a field of type `hint`, or None."""
    if "entries" in bounds:
        return _check_entries(value, *bounds["entries"])
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if typing.get_origin(option) is Literal or "choices" in bounds:
            choices = bounds.get("choices") or typing.get_args(option)
            return None if value in choices else f"must be one of {', '.join(map(repr, choices))}, got {value!r}"
        if option is type(None):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        accepted = number if option is float else isinstance(value, option) and not (option is int and value is True)
        if option is int and isinstance(value, bool):
            accepted = False
        if not accepted:
            names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
            return f"must be {names.get(option, option.__name__)}, got {value!r}"
        if option is str and not value.strip():
            return "must not be empty"
        if number and not math.isfinite(value):
            return f"must be finite, got {value}"
        pattern = bounds.get("pattern")
        if pattern is not None and not re.fullmatch(pattern, value):
            return f"must match {pattern}, got {value!r}"
        low, high = bounds.get("low"), bounds.get("high")
        if number and low is not None and not (low <= value and (high is None or value <= high)):
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            return f"must be {limits}, got {value}"
    return None


def _check_entries(value: Any, pattern: str, words: str) -> str | None:
    """The same for a list of texts. The value is not repeated: it may be a key."""
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        return 'must be a list of texts, e.g. ["a", "b"]'
    wrong = next((number for number, entry in enumerate(value, 1) if not re.fullmatch(pattern, entry)), None)
    return None if wrong is None else f"entry {wrong} must be {words}"
