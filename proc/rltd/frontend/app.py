"""The HTTP routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rlt import __version__
from rlt.config import ServerConfig
from rlt_protocols.answers import ModelCard, ModelList, VersionBody
from rlt_protocols.openai import GenerationRequest
from rlt_protocols.params import ModelInfo
from rltd.frontend.access import guarded
from rltd.frontend.answer import JobAnswer
from rltd.frontend.body import BodyMemory, read_json_body
from rltd.frontend.engine_client import RESTART_RETRY_AFTER_S, EngineClient
from rltd.frontend.errors import JSON, ApiError, ClientGone, internal, shorten, too_busy, unavailable
from rltd.frontend.job import Job
from rltd.frontend.metrics import Metrics
from rltd.frontend.prepare import Preparer, check_model
from rltd.frontend.request_id import RequestIds
from rltd.frontend.shapes import ChatShape, CompletionShape, Shape

T = TypeVar("T")


class Api:
    """The endpoints. CPU work of unknown size (JSON, templates, tokenizing) runs on `workers`."""

    def __init__(
        self,
        client: EngineClient,
        preparer: Preparer,
        metrics: Metrics,
        workers: Executor,
        server: ServerConfig,
    ) -> None:
        self._client = client
        self._preparer = preparer
        self._metrics = metrics
        self._workers = workers
        self._server = server
        self._bodies = BodyMemory(server.max_body_bytes)
        #: requests whose body is being read or prepared; bounded like those that run
        self._preparing = 0
        self._created = int(time.time())

    def app(self) -> ASGIApp:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]
        handlers = {
            ApiError: _api_error,
            ClientGone: _client_gone,
            HTTPException: _http_error,
            Exception: _internal_error,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        # A path with a slash too many is an unknown path, not a redirect that POST clients would follow with GET.
        app.router.redirect_slashes = False
        return RequestIds(guarded(app, self._server))

    async def completions(self, request: Request) -> Response | JobAnswer:
        started_s = time.monotonic()
        info = self._client.check_admission()
        prepared = await self._prepared(request, info, self._preparer.completion)
        job = self._client.submit("cmpl", prepared.choices, started_s)
        shape = CompletionShape(
            prepared.request, job, info.name, prepared.echoes, has_text=self._preparer.has_tokenizer
        )
        return self._answer(job, shape, prepared.request)

    async def chat(self, request: Request) -> Response | JobAnswer:
        started_s = time.monotonic()
        info = self._client.check_admission()
        prepared = await self._prepared(request, info, self._preparer.chat)
        job = self._client.submit("chatcmpl", prepared.choices, started_s)
        shape = ChatShape(
            prepared.request,
            job,
            info.name,
            prepared.echoes,
            has_text=self._preparer.has_tokenizer,
            form=prepared.form,
        )
        return self._answer(job, shape, prepared.request)

    def _answer(self, job: Job, shape: Shape, request: GenerationRequest) -> JobAnswer:
        limit_s = self._server.request_timeout_s
        return JobAnswer(self._client, job, shape, stream=bool(request.stream), timeout_s=limit_s)

    async def tokenize(self, request: Request) -> Response:
        return _json(await self._prepared(request, self._info(), self._preparer.tokenize))

    async def detokenize(self, request: Request) -> Response:
        return _json(await self._prepared(request, self._info(), self._preparer.detokenize))

    async def models(self, request: Request) -> Response:
        return _json(ModelList((self._card(self._info()),)))

    async def model(self, request: Request) -> Response:
        info = self._info()
        check_model(request.path_params["name"], info)
        return _json(self._card(info))

    async def health(self, request: Request) -> Response:
        if not self._client.healthy:
            raise unavailable("a process of the server is being restarted", "unhealthy", RESTART_RETRY_AFTER_S)
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if not self._client.accepting:
            raise unavailable("the server takes no requests now", "not_ready", RESTART_RETRY_AFTER_S)
        return _json({"status": "ready"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def version(self, request: Request) -> Response:
        return _json(VersionBody(__version__))

    async def _prepared(self, request: Request, info: ModelInfo, prepare: Callable[[bytes, ModelInfo], T]) -> T:
        if self._preparing >= self._server.max_queue:
            raise too_busy()
        self._preparing += 1
        try:
            with self._bodies.share() as take:
                body = await read_json_body(request.headers, request.receive, self._server.max_body_bytes, take)
                return await asyncio.get_running_loop().run_in_executor(self._workers, prepare, body, info)
        finally:
            self._preparing -= 1

    def _info(self) -> ModelInfo:
        info = self._client.info
        if info is None:
            raise unavailable("the server is loading the model", "not_ready", RESTART_RETRY_AFTER_S)
        return info

    def _card(self, info: ModelInfo) -> ModelCard:
        return ModelCard(id=info.name, created=self._created, max_model_len=info.max_model_len, loops=info.loops)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _client_gone(request: Request, error: Exception) -> Response:
    # Nobody reads it; the server wants a response nevertheless.
    return ApiError(499, "the client closed the connection").response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette's router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    path = shorten(request.url.path)
    messages = {404: f"there is nothing at {path}", 405: f"{request.method} is not allowed at {path}"}
    message = messages.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, and the server logs it with its traceback.
    return internal(request.state.request_id).response()
