"""Answers from any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from rlt.bench.serve import error_text
from rlt.evals.answers import REFUSED, Answer, Asked, EvalError
from rlt_protocols.params import SamplingParams

CONCURRENCY = 16
TIMEOUT_S = 1800.0

_DEFAULTS = msgspec.to_builtins(SamplingParams())


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and how it is asked. `base_url` is without /v1; `model` None takes the first that it lists."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    #: most requests under way at a time
    concurrency: int = CONCURRENCY
    #: for the whole answer, since it comes in one piece
    timeout_s: float = TIMEOUT_S
    #: the chat template's option enable_thinking
    thinking: bool | None = None


class EndpointAnswerer:
    """Asks `endpoint`. Raises `EvalError` when nobody answers there or no model is to be found."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
        # Made once: it reads the system's certificates.
        self._ssl = httpx.create_ssl_context()
        card = self._card()
        self._model = endpoint.model or str(card["id"])
        loops = card.get("loops")
        self._loops = loops if type(loops) is int else None

    @property
    def model(self) -> str:
        return self._model

    @property
    def loops(self) -> int | None:
        return self._loops

    @property
    def full_depth(self) -> str | None:
        return None

    @property
    def exit_rule(self) -> str | None:
        return None

    @property
    def settings(self) -> dict[str, object]:
        # All that is known: what the server was started with is not.
        return {"base_url": self._endpoint.base_url}

    def answers(self, asked: Sequence[Asked]) -> Iterator[tuple[int, Answer]]:
        endpoint = self._endpoint
        limits = httpx.Limits(max_connections=endpoint.concurrency, max_keepalive_connections=endpoint.concurrency)
        client = httpx.AsyncClient(
            base_url=endpoint.base_url,
            headers=self._headers,
            limits=limits,
            # Waiting for one of the connections is waiting for other answers.
            timeout=httpx.Timeout(endpoint.timeout_s, connect=30.0, pool=None),
            trust_env=False,
            verify=self._ssl,
        )
        gate = asyncio.Semaphore(endpoint.concurrency)

        async def one(index: int, question: Asked) -> tuple[int, Answer]:
            async with gate:
                return index, await self._ask(client, question)

        # The loop runs only while the next answer is waited for; leaving early cancels what is under way.
        with asyncio.Runner() as runner:
            finished: asyncio.Queue[asyncio.Task[tuple[int, Answer]]] = asyncio.Queue()
            tasks = [runner.get_loop().create_task(one(i, question)) for i, question in enumerate(asked)]
            for task in tasks:
                task.add_done_callback(finished.put_nowait)
            try:
                for _ in tasks:
                    yield runner.run(finished.get()).result()
            finally:
                for task in tasks:
                    task.cancel()
                runner.run(client.aclose())

    def close(self) -> None:
        """Nothing is held between calls."""

    def _card(self) -> dict[str, Any]:
        """What the server says about the model; {} if it says nothing and the model was named."""
        endpoint = self._endpoint
        problem = "does not list a model"
        try:
            url = f"{endpoint.base_url}/v1/models"
            response = httpx.get(url, headers=self._headers, timeout=30.0, trust_env=False, verify=self._ssl)
            if response.is_success:
                cards = [card for card in response.json()["data"] if endpoint.model in (None, card["id"])]
                if cards:
                    return dict(cards[0])
            else:
                problem = f"answers {response.status_code}: {error_text(response.content)}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EvalError(
                f"{endpoint.base_url}: no server answers there ({error}); start one or check --base-url"
            ) from error
        except (ValueError, KeyError, TypeError):
            pass
        if endpoint.model is None:
            raise EvalError(f"{endpoint.base_url}: /v1/models {problem}; give --model")
        return {}

    async def _ask(self, client: httpx.AsyncClient, question: Asked) -> Answer:
        """One answer; whatever goes wrong is its error, since the other questions must outlive it."""
        chat = not isinstance(question.prompt, str)
        body = {"model": self._model, **self._fields(question)}
        try:
            response = await client.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
            if not response.is_success:
                text = f"HTTP {response.status_code}: {error_text(response.content)}"
                return Answer(error=text, refused=response.status_code in REFUSED)
            return _read(response.json(), chat)
        except httpx.HTTPError as error:
            return Answer(error=f"{type(error).__name__}: {error}")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Answer(error=f"an answer that is not a completion ({error!r})")

    def _fields(self, question: Asked) -> dict[str, Any]:
        # Only what was set: other servers refuse fields that they do not know, or ignore them.
        settings = {k: v for k, v in msgspec.to_builtins(question.params).items() if v != _DEFAULTS[k]}
        if isinstance(question.prompt, str):
            return {"prompt": question.prompt, **settings}
        thinking = self._endpoint.thinking
        options = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        return {"messages": question.prompt, **settings, **options}


def _read(body: dict[str, Any], chat: bool) -> Answer:
    choice = body["choices"][0]
    message = choice["message"] if chat else choice
    text = message["content"] if chat else choice["text"]
    # A server that splits off the reasoning has no content before its end.
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    usage = body.get("usage") or {}
    tokens, loops = usage.get("completion_tokens"), (usage.get("loops") or {}).get("total")
    return Answer(
        text="" if text is None else str(text),
        tokens=None if tokens is None else int(tokens),
        loops=None if loops is None else int(loops),
        finish_reason=choice.get("finish_reason"),
        reasoning=None if reasoning is None else str(reasoning),
    )
