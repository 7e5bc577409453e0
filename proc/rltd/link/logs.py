"""How every process of the daemon logs: to stderr, as text or as one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
import time

from rlt.config import LogConfig


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(config: LogConfig, process: str) -> None:
    """Set up the root logger; `process` names this process in JSON lines (text lines get it from the supervisor)."""
    handler = logging.StreamHandler(sys.stderr)
    if config.format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
