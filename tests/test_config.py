"""Values that a configuration must not have, however they are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlt.config import load_config
from rlt.errors import ConfigError


def problems(*assignments: str, path: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(path, assignments=assignments)
    return error.value.problems


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("kv.layout=cyclic:10000", "kv.layout must match "),
        ("kv.layout=cyclic:99999999999999999999", "kv.layout must match "),
        ("engine.cpu_threads=1025", "engine.cpu_threads must be between 1 and 1024, got 1025"),
        ("server.drain_timeout_s=inf", "server.drain_timeout_s must be finite, got inf"),
        ("server.drain_timeout_s=nan", "server.drain_timeout_s must be finite, got nan"),
        ("server.host=", "server.host must not be empty"),
        ("model.path=", "model.path must not be empty"),
        ("model.served_name=' '", "model.served_name must not be empty"),
        ("kv.pages=" + "[" * 100_000, "is nested too deeply"),
        ("exit.rule=gate", "exit.rule must be one of 'full_depth', 'ouro', "),
        ("exit.rule=5", "exit.rule must be one of 'full_depth', 'ouro', "),
        ("exit.check_interval=0", "exit.check_interval must be between 1 and 10000, got 0"),
        (
            "exit.check_interval=2",
            "exit.check_interval has a meaning with the exit rules entropy, kl, minp_kl, argmax only",
        ),
        ("exit.threshold=2e6", "exit.threshold must be between 0 and 1000000.0, got 2000000.0"),
        ("model.initial_state=normal", "model.initial_state must be one of 'zero', 'seeded', got 'normal'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(assignment: str, problem: str) -> None:
    (line,) = problems(assignment)
    assert problem in line


@pytest.mark.parametrize(
    ("rule", "threshold", "limits"),
    [
        ("cosine", 2.5, "between 0 and 2"),
        ("argmax", 0.5, "between 1 and 1000000"),
        ("full_depth", 0.5, "between 1 and 1000000"),
    ],
)
def test_a_threshold_has_the_limits_of_its_rule(rule: str, threshold: float, limits: str) -> None:
    assert problems(f"exit.rule={rule}", f"exit.threshold={threshold}") == [
        f'exit.threshold must be {limits} with exit.rule = "{rule}", got {threshold:g}'
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_assignment_is_one_line(end: str) -> None:
    text = f"kv.pages=4096{end}x=1"
    assert problems(text) == [f"--set {text!r}: must be one line; give --set once for each key"]


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rlt.toml"
    file.write_text("\ufeff[kv]\npages = 5\n", encoding="utf-8")
    assert load_config(file).kv.pages == 5


def test_a_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    file = tmp_path / "rlt.toml"
    file.write_text("x = " + "[" * 100_000)
    assert problems(path=file) == [f"{file}: is nested too deeply"]
