from __future__ import annotations

from typing import Any

import pytest

from rlt.text.schema import typed_json

DEFINITIONS: dict[str, Any] = {"Colour": {"enum": ["red", 3]}, "Loop": {"$ref": "#/$defs/Loop"}, "Day": {"const": 7}}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, ' a "b"\n', '" a \\"b\\"\\n"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, "é", '"é"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
        ({"type": ["string", "integer"]}, "5", '"5"'),
        ({"type": "integer"}, " 12345678901234567890123\n", "12345678901234567890123"),
        ({"type": "integer"}, "5.0", "5.0"),
        ({"type": "integer"}, "5.5", '"5.5"'),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "integer"}, "true", '"true"'),
        ({"type": "number"}, "5", "5"),
        ({"type": "number"}, "1e5", "1e5"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "False", "false"),
        ({"type": "boolean"}, "1", '"1"'),
        ({"type": "object"}, '{"a": [1, "x"]}', '{"a": [1, "x"]}'),
        ({"type": "object"}, '{"a": ', '"{\\"a\\": "'),
        ({"type": "object"}, "[" * 5000, f'"{"[" * 5000}"'),
        ({"type": "array"}, "[1,\n2]", "[1,\n2]"),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[1]", "[1]"),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"$ref": "#/$defs/Day"}, "7", "7"),
        ({"$ref": "#/$defs/Colour"}, "3", '"3"'),
        ({"$ref": "#/$defs/Loop"}, "3", '"3"'),
        ({"$ref": "#/$defs/None/of/it"}, "3", '"3"'),
        ({"$ref": "elsewhere.json"}, "3", '"3"'),
        ({}, "3", '"3"'),
        ({"type": 5, "anyOf": 5, "enum": 5}, "3", '"3"'),
        (True, "3", '"3"'),
    ],
)
def test_the_schema_says_what_a_text_is(schema: Any, text: str, expected: str) -> None:
    assert typed_json(text, {"properties": {"key": schema}, "$defs": DEFINITIONS}, "key") == expected


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_references_that_fan_out_in_circles_are_followed_once(word: str) -> None:
    """Followed each time that they are met, they would be 40 to the power of the depth."""
    names = [f"D{number}" for number in range(40)]
    fans: dict[str, Any] = {name: {word: [{"$ref": f"#/$defs/{other}"} for other in names]} for name in names}
    for last, expected in ({"type": "integer"}, "3"), ({"type": "array"}, '"3"'):
        schema = {"properties": {"key": fans["D0"]}, "$defs": fans | {"D39": last}}
        assert typed_json("3", schema, "key") == expected


@pytest.mark.parametrize("schema", [{}, {"properties": 5}, {"properties": {"other": {"type": "integer"}}}])
def test_without_a_schema_a_text_is_a_text(schema: dict[str, Any]) -> None:
    assert typed_json("3", schema, "key") == '"3"'
