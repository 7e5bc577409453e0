"""An engine that counts instead of computing: token i of a request is i."""

from __future__ import annotations

import threading

from rlt_protocols.engine import EngineStats
from rlt_protocols.params import ModelInfo, ParamError, ResolvedParams
from rlt_protocols.text import Tokens

INFO = ModelInfo(
    name="fake",
    family="ouro",
    vocab_size=100,
    max_model_len=64,
    loops=4,
    min_loops=1,
    max_loops=4,
    exit_threshold=1.0,
    eos_token_ids=(2,),
    kv_tokens=64,
)


class FakeEngine:
    """Each step gives every request one token until `max_tokens`. `gate` holds a step back until a test lets it go."""

    def __init__(self, gate: threading.Semaphore | None = None) -> None:
        self.info = INFO
        self.requests: dict[str, tuple[int, int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.ticks = 0
        self.checks = 0
        self.stepping = threading.Event()
        self._gate = gate
        self._tokens = 0
        self._tick_seconds: list[float] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request_id: str, prompt: list[int], params: ResolvedParams) -> None:
        if max(prompt) >= INFO.vocab_size:
            raise ParamError("prompt", "has a token id outside the vocabulary")
        self.requests[request_id] = (0, params.max_tokens)
        self.prompts[request_id] = prompt

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def reset_prefix_cache(self) -> int:
        return 6

    def step(self) -> list[Tokens]:
        self.stepping.set()
        if self._gate is not None:
            self._gate.acquire()
        self.ticks += 1
        self._tick_seconds.append(0.001)
        outputs = []
        for request_id, (done, limit) in list(self.requests.items()):
            self._tokens += 1
            last = done + 1 == limit
            outputs.append(Tokens(request_id, token_ids=(done,), depths=(2,), finish_reason="length" if last else None))
            if last:
                del self.requests[request_id]
            else:
                self.requests[request_id] = (done + 1, limit)
        return outputs

    def check_integrity(self) -> None:
        self.checks += 1
        assert not self.requests, "checked while there is work"

    def stats(self) -> EngineStats:
        seconds, self._tick_seconds = tuple(self._tick_seconds), []
        return EngineStats(
            engine=0,
            running=len(self.requests),
            waiting=0,
            kv_pages={"free": 7, "used": len(self.requests)},
            ticks=self.ticks,
            tick_rows={"decode": self._tokens},
            tick_seconds=seconds,
            tokens=self._tokens,
            token_loops=2 * self._tokens,
        )
