"""Nothing that runs code from data: what comes over a socket or lies in a file is only ever data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "multiprocessing", "yaml"}
CALLS = {"torch.load", "torch.save", "pd.read_pickle", "eval", "exec"}
#: of ZeroMQ's sockets, which pickle
METHODS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module
            case ast.Call(func=func) if ast.unparse(func) in CALLS:
                yield ast.unparse(func)
            case ast.Attribute(attr=name) if name in METHODS:
                yield name
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=value)) if value is not False:
                yield "allow_pickle"


def test_no_code_from_data() -> None:
    files = [file for top in ("src", "proc", "protocols") for file in (ROOT / top).rglob("*.py")]
    assert len(files) > 100
    found = {str(file.relative_to(ROOT)): list(offences(file.read_text(encoding="utf-8"))) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


def test_the_search_finds_them() -> None:
    source = "import pickle\nfrom dill import x\ntorch.load(f)\ns.recv_pyobj()\nnp.load(f, allow_pickle=True)\neval(a)"
    assert sorted(offences(source)) == sorted(["pickle", "dill", "torch.load", "recv_pyobj", "allow_pickle", "eval"])
