"""Sends a job's answers, as server-sent events or as one body, and watches whether the client is still there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from rltd.frontend.engine_client import EngineClient
from rltd.frontend.errors import ApiError, ClientGone, internal
from rltd.frontend.job import Failure, Job, Update
from rltd.frontend.shapes import DONE, Collected, Shape, event

log = logging.getLogger(__name__)

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class JobAnswer:
    """An ASGI response that runs a submitted job to its end, whatever that is."""

    def __init__(self, client: EngineClient, job: Job, shape: Shape, *, stream: bool, timeout_s: float | None) -> None:
        """`timeout_s` is the limit for the whole request, from its arrival."""
        self._client = client
        self._job = job
        self._shape = shape
        self._stream = stream
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id: str = scope["state"]["request_id"]
        outcome = "cancelled"
        try:
            async with _watched(receive, self._job), self._limited():
                answer = self._send_events if self._stream else self._send_whole
                outcome = await answer(scope, receive, send, request_id)
        except ClientGone:
            outcome = "client left"
        finally:
            self._client.abort(self._job)
            self._log(request_id, outcome)

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """End what is unfinished when the request's time is up."""
        if self._timeout_s is None:
            yield
            return
        message = f"the answer took longer than the limit of {self._timeout_s:g} seconds"
        failure = Failure(message, "request_timeout", 503)
        left_s = self._job.choices[0].started_s + self._timeout_s - time.monotonic()
        timer = asyncio.get_running_loop().call_later(left_s, self._client.give_up, self._job, failure)
        try:
            yield
        finally:
            timer.cancel()

    async def _send_events(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> str:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        outcome = "done"
        try:
            async for news in self._until_done():
                # What was ready together leaves together: one write for all answers of this job.
                events = [chunk for update in news if (chunk := self._shape.chunk(update)) is not None]
                if events:
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            last = self._shape.usage_chunk() if self._shape.with_usage else b""
        except ApiError as error:
            outcome = "error"
            last = event(error.body())
        except ClientGone:
            raise
        except Exception:
            log.exception("request %s: writing the answer failed", request_id)
            outcome = "error"
            last = event(internal(request_id).body())
        await send({"type": "http.response.body", "body": last + DONE, "more_body": False})
        return outcome

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> str:
        answers = [Collected() for _ in self._job.choices]
        try:
            async for news in self._until_done():
                for update in news:
                    answers[update.choice.index].add(update)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return "error"
        body = self._shape.whole(answers)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return "done"

    async def _until_done(self) -> AsyncIterator[list[Update]]:
        """All updates; raises `ApiError` for the first answer that fails, after what came with it."""
        open_answers = len(self._job.choices)
        while open_answers:
            news = await self._job.updates()
            failures = [update.failure for update in news if update.failure is not None]
            yield [update for update in news if update.failure is None]
            if failures:
                raise ApiError(failures[0].status, failures[0].message, code=failures[0].code)
            open_answers -= sum(update.finish_reason is not None for update in news)

    def _log(self, request_id: str, outcome: str) -> None:
        choices = self._job.choices
        tokens = sum(choice.completion_tokens for choice in choices)
        loops = sum(choice.loops for choice in choices)
        first_s = min((choice.first_s for choice in choices if choice.first_s is not None), default=None)
        started_s = choices[0].started_s
        log.info(
            "%s (%s): %s, prompt %d, answers %d, tokens %d, first after %s, total %.3f s, loops %.2f, reasons %s",
            self._job.id,
            request_id,
            outcome,
            self._job.prompt_tokens,
            len(choices),
            tokens,
            "-" if first_s is None else f"{first_s - started_s:.3f} s",
            time.monotonic() - started_s,
            loops / tokens if tokens else 0.0,
            ",".join(sorted({choice.finish_reason or "abort" for choice in choices})),
        )


@asynccontextmanager
async def _watched(receive: Receive, job: Job) -> AsyncIterator[None]:
    """Tell the job when the client closes the connection meanwhile."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.client_left()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
