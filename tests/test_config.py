"""Values that a configuration must not have, however they are given."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from rlt.config import Config, load_config
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
        ("server.uds=", "server.uds must not be empty"),
        ('server.uds="a\\u0000b"', "server.uds must match "),
        ("server.request_timeout_s=0", "server.request_timeout_s must be at least 0.001, got 0"),
        ("server.api_keys=[1]", 'server.api_keys must be a list of texts, e.g. ["a", "b"]'),
        ("server.api_keys=a", "server.api_keys must be a list of texts"),
        ('server.api_keys=["a", ""]', "server.api_keys entry 2 must be a key of visible ASCII characters, or sha256:"),
        ('server.api_keys=["a b"]', "server.api_keys entry 1 must be "),
        ('server.api_keys=["sha256:12"]', "server.api_keys entry 1 must be "),
        ('server.cors_origins=["https://a.org/"]', 'server.cors_origins entry 1 must be "*" or an origin '),
        ('server.cors_origins=["a.org"]', "server.cors_origins entry 1 must be "),
        (
            'server.allowed_hosts=["a.org:80"]',
            "server.allowed_hosts entry 1 must be a name in lower case or an address",
        ),
        ('server.allowed_hosts=["A.org"]', "server.allowed_hosts entry 1 must be "),
        ("server.tls_cert=a.pem", "server.tls_cert and server.tls_key go together"),
        ("server.tls_key=a.pem", "server.tls_cert and server.tls_key go together"),
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


def test_only_the_hashes_of_access_keys_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "rlt.toml"
    hashed = "sha256:" + hashlib.sha256(b"second").hexdigest()
    file.write_text(f'[server]\napi_keys = ["first", "{hashed}"]\n')
    config = load_config(file)
    assert config.server.api_keys == ("sha256:" + hashlib.sha256(b"first").hexdigest(), hashed)
    assert "first" not in repr(config)
    # The other processes get the same.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


def test_a_wrong_access_key_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "rlt.toml"
    for value in ('"secret key"', '["secret key"]', '["x", "secret key"]', '{a = "secret key"}'):
        file.write_text(f"[server]\napi_keys = {value}\n")
        (line,) = problems(path=file)
        assert line.startswith(f"{file}:2: server.api_keys ")
        assert "secret" not in line
