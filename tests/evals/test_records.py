from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlt.errors import ConfigError
from rlt.evals.records import Record, RecordFile, digest

SETTINGS = {"model": "m", "stop": ("\n",)}


def record(number: int, error: str | None = None) -> Record:
    return Record(id=number, prompt_hash=f"h{number}", gold="1", text="ü\n", error=error)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.jsonl"


def test_goes_on_where_it_was(path: Path) -> None:
    with RecordFile(path, SETTINGS) as file:
        file.add(record(0))
        file.add(record(1, "down"))
    with RecordFile(path, SETTINGS) as file:
        assert file.records == {0: record(0), 1: record(1, "down")}
        file.add(record(1))
    with RecordFile(path, SETTINGS) as file:
        assert file.records == {0: record(0), 1: record(1)}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"record": "rlt eval gsm8k", "version": 1, "settings": {"model": "m", "stop": ["\n"]}}
    assert [line["id"] for line in lines[1:]] == [0, 1, 1]


def test_each_record_is_in_the_file_at_once(path: Path) -> None:
    with RecordFile(path, SETTINGS) as file:
        file.add(record(0))
        assert len(path.read_text(encoding="utf-8").splitlines()) == 2


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    with RecordFile(None, SETTINGS) as file:
        file.add(record(0))
        assert file.records == {0: record(0)}
    assert list(tmp_path.iterdir()) == []


def test_every_cut_of_a_stopped_run_can_be_gone_on_from(path: Path) -> None:
    with RecordFile(path, SETTINGS) as file:
        for number in range(2):
            file.add(record(number))
    content = path.read_bytes()
    newlines = [index for index, byte in enumerate(content) if byte == ord("\n")]
    for cut in {*range(0, len(content), 9), *(i + j for i in newlines for j in (-1, 0, 1))}:
        path.write_bytes(content[:cut])
        with RecordFile(path, SETTINGS) as file:
            assert list(file.records) == [0, 1][: max(content[:cut].count(b"\n") - 1, 0)]
            for number in range(len(file.records), 2):
                file.add(record(number))
        assert path.read_bytes() == content


def test_a_record_has_one_run_at_a_time(path: Path) -> None:
    with RecordFile(path, SETTINGS) as file:
        file.add(record(0))
        with pytest.raises(ConfigError, match="is in use by another run"):
            RecordFile(path, SETTINGS)
        file.add(record(1))
    with RecordFile(path, SETTINGS) as file:
        assert list(file.records) == [0, 1]


def test_other_settings_are_refused_by_name(path: Path) -> None:
    with RecordFile(path, SETTINGS | {"long": "x" * 100, "gone": 1}) as file:
        file.add(record(0))
    before = path.read_bytes()
    with pytest.raises(ConfigError) as caught:
        RecordFile(path, SETTINGS | {"long": "y" * 100, "model": "other"})
    text = str(caught.value)
    assert f"--record: {path} was made with other settings: gone was 1 and is null; " in text
    assert 'model was "m" and is "other". Give these again, or another file' in text
    assert len(text) < 500
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("no record", 1),
        ("\n", 1),
        ('{"record":5', 1),
        ('{"record":"of something else', 1),
        ('{"question": "x"}\n', 1),
        ('{"record":"other","version":1,"settings":{}}\n', 1),
        ('{"record":"rlt eval gsm8k","version":2,"settings":{}}\n', 1),
        ('{"record":"rlt eval gsm8k","version":1,"settings":{}}\n{"id":0}\n', 2),
        ('{"record":"rlt eval gsm8k","version":1,"settings":{}}\nnot JSON\n', 2),
        ('{"record":"rlt eval gsm8k","version":1,"settings":{}}\n{"id":0,"prompt_hash":"","gold":"","x":1}\n', 2),
    ],
)
def test_another_file_is_left_alone(path: Path, content: str, line: int) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"r.jsonl, line {line}: is no record of an evaluation; give another file"):
        RecordFile(path, {})
    assert path.read_text() == content


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record: .*: No such file or directory"):
        RecordFile(tmp_path / "none" / "r.jsonl", {})
    with pytest.raises(ConfigError, match=r"--record: .*: Is a directory"):
        RecordFile(tmp_path, {})


def test_a_digest_depends_on_the_value_only() -> None:
    assert digest({"a": 1, "b": ["ü"]}) == digest({"b": ["ü"], "a": 1})
    assert digest(["a", "b"]) != digest(["ab"])
