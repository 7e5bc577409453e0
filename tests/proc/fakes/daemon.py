"""A whole daemon with fake children: daemon.py [section.key=value ...]; RLT_TEST_LIMITS has JSON for `Limits`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rlt.config import load_config
from rlt.errors import RltError
from rltd.cli import _explain
from rltd.supervisor.main import serve
from rltd.supervisor.restart import Limits

HERE = Path(__file__).parent
COMMANDS = {
    "frontend": (sys.executable, str(HERE / "peer.py"), "frontend"),
    "engine": (sys.executable, str(HERE / "engine.py")),
    "detokenizer": (sys.executable, str(HERE / "peer.py"), "detokenizer"),
}

if __name__ == "__main__":
    try:
        limits = Limits(**json.loads(os.environ.get("RLT_TEST_LIMITS", "{}")))
        sys.exit(serve(load_config(assignments=sys.argv[1:]), commands=COMMANDS, limits=limits))
    except RltError as error:
        sys.exit(_explain(error, debug=False))
