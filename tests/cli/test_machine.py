from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rlt
from rlt.bench import environment, machine


def test_the_environment_names_what_a_result_depends_on() -> None:
    facts = environment()
    assert facts["rlt"] == rlt.__version__
    assert {"python", "torch", "cpu", "cores", "gpu", "commit", "system", "threads"} <= facts.keys()
    assert isinstance(facts["cores"], int)
    assert json.loads(json.dumps(facts)) == facts


def test_a_client_needs_no_torch() -> None:
    assert not {"torch", "gpu", "threads"} & environment(with_torch=False).keys()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository that the package seems to be imported from."""
    package = tmp_path / "src" / "rlt" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.setattr(rlt, "__file__", str(package))
    return tmp_path


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


def test_the_commit_tells_whether_files_were_changed(tree: Path) -> None:
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "x")
    clean = machine.environment(with_torch=False)["commit"]
    assert isinstance(clean, str)
    assert len(clean) == 12
    (tree / "src" / "rlt" / "__init__.py").write_text("changed")
    assert machine.environment(with_torch=False)["commit"] == f"{clean}-changed"


def test_there_is_no_commit_outside_a_repository(tree: Path) -> None:
    assert environment(with_torch=False)["commit"] is None


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("git", 10)])
def test_git_may_be_missing_or_slow(tree: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    (tree / ".git").mkdir()

    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert environment(with_torch=False)["commit"] is None


def test_the_cpu_is_named_where_the_system_says_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: A CPU: fast\n")
    assert machine._cpu_model(cpuinfo) == "A CPU: fast"
    cpuinfo.write_text("processor : 0\n")
    assert machine._cpu_model(cpuinfo) != ""
