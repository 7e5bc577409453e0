"""What type a tool's JSON schema gives a parameter whose value came as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def typed_json(text: str, schema: Mapping[str, Any], key: str) -> str:
    """`text`, the value of the parameter `key`, as JSON of a type that `schema` (of all parameters) allows.

    A parameter that may be a string is one, except `null` where that is allowed too. Otherwise a text that is JSON of
    an allowed type is taken as it is. What fits no type becomes a string, so that nothing is lost.
    """
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    types = _types(own, schema)
    value = text.strip()
    if "null" in types and value == "null":
        return value
    if "string" not in types:
        if "boolean" in types and value in ("True", "False"):
            # Templates that print values as Python does teach models to do so.
            value = value.lower()
        if _types_of_json(value) & types:
            return value
    return msgspec.json.encode(text).decode()


def _types_of_json(text: str) -> frozenset[str]:
    """The types that a value has; none if `text` is no JSON."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return frozenset()
    own = _JSON_TYPES[type(value)]
    # In a schema every integer is a number, and a number without a fraction is an integer.
    if own == "integer" or (isinstance(value, float) and value.is_integer()):
        return frozenset(("integer", "number"))
    return frozenset((own,))


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows, as far as it says; none when it does not."""
    types: set[str] = set()
    left = [schema]
    # Each part is read once: references may go round in circles, and fan out in each round.
    seen: set[int] = set()
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            types.update(_own_types(part))
            for word in ("anyOf", "oneOf", "allOf"):
                parts = part.get(word)
                left += parts if isinstance(parts, list) else ()
            if isinstance(reference := part.get("$ref"), str):
                left.append(_resolve(reference, root))
    return frozenset(types)


def _own_types(schema: Mapping[str, Any]) -> Iterator[str]:
    """The types that a schema states itself."""
    stated = schema.get("type")
    if isinstance(stated, str):
        yield stated
    elif isinstance(stated, list):
        yield from (name for name in stated if isinstance(name, str))
    else:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if isinstance(values, list):
            yield from (_JSON_TYPES[type(value)] for value in values)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a reference inside it names, such as `#/$defs/Colour`; None if there is none."""
    start, *steps = reference.split("/")
    found: Any = root if start == "#" else None
    for step in steps:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found
