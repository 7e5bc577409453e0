from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_docs.py"


def check(root: Path, text: str, name: str = "README.md") -> list[str]:
    """The lines that the script prints for a tree with one document; its exit code must agree with them."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    done = subprocess.run([sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == bool(done.stdout)
    return done.stdout.splitlines()


def test_good_documents_pass(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "kv.md").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "serve").touch()
    text = """
[page](docs/kv.md#top) [folder](docs) [web](https://example.org/x) [here](#here) ![root](/docs/kv.md "title")
`[not a link](nowhere.md)`

```python
[neither](nowhere.md)
```

```sh
$ scripts/serve --port 0 &
./scripts/serve
rlt generate --prompt "it's" # comment
.venv/bin/rlt bench serve --json
CUDA_VISIBLE_DEVICES=0 rlt eval tasks
curl http://127.0.0.1:8000/v1/completions -d '{
```
"""
    assert check(tmp_path, text) == []


@pytest.mark.parametrize("name", ["README.md", "docs/a.md", "docs/models/a.md", "recipes/tiny/deep/README.md"])
def test_a_link_to_nowhere_is_named(tmp_path: Path, name: str) -> None:
    assert (
        check(tmp_path, "\n[a](b.md) and [c](../README.md#x?)\n", name)[0] == f"{name}:2: the link b.md leads nowhere"
    )


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    text = "```bash\nscripts/nope\nrlt generat\nrlt bench nope --json\n```\n```python\nrlt nope\n```\n"
    lines = check(tmp_path, text)
    assert lines[0] == "README.md:2: scripts/nope does not exist"
    assert lines[1].startswith("README.md:3: rlt has no command generat; known: bench, ")
    assert lines[2].startswith("README.md:4: rlt has no command nope; known: ")
    assert len(lines) == 3


def test_this_repository_is_in_order() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0
