"""Access keys, browsers' origins and names of hosts."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import httpx
import openai
import pytest

from frontend.harness import error_of, on_socket, served
from rltd.frontend import access

KEY = "rlt-0123456789abcdef"
HASHED = "sha256:" + hashlib.sha256(b"other").hexdigest()
KEYS: dict[str, Any] = {"api_keys": (KEY, HASHED)}

ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/nothing/here"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("OPTIONS", "/v1/models"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_a_key(method: str, path: str) -> None:
    async with served(settings=KEYS) as server:
        response = await server.http.request(method, path, content=b"no JSON")
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert len(response.headers["x-request-id"]) == 32
        error = error_of(response)
        assert error == {
            "message": "an access key is needed: send it as Authorization: Bearer KEY",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }


async def test_health_and_ready_need_none() -> None:
    async with served(settings=KEYS | {"allowed_hosts": ("a.org",)}) as server:
        for path in ("/health", "/ready"):
            assert (await server.http.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer   {KEY} ", 200),
        ("Bearer other", 200),
        (f"Bearer {HASHED}", 401),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY.upper()}", 401),
        (f"Bearer {KEY} {KEY}", 401),
        ("Bearer \xff\xfe", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        ("", 401),
    ],
)
async def test_who_gets_in(header: str, status: int) -> None:
    async with served(settings=KEYS) as server:
        response = await server.http.get("/version", headers={"Authorization": header.encode("latin-1")})
        assert response.status_code == status
        assert KEY not in response.text


async def test_without_keys_any_key_is_taken() -> None:
    async with served() as server:
        assert (await server.http.get("/version", headers={"Authorization": "Bearer x"})).status_code == 200


async def test_a_key_is_compared_with_all_of_them_by_their_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return one == other

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    async with served(settings=KEYS) as server:
        await server.http.get("/version", headers={"Authorization": f"Bearer {KEY}"})
    sent = hashlib.sha256(KEY.encode()).digest()
    assert seen == [(sent, sent), (sent, hashlib.sha256(b"other").digest())]


def _api(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def test_the_openai_client_with_a_right_and_a_wrong_key() -> None:
    def use(url: str) -> str:
        with _api(url, "wrong") as api, pytest.raises(openai.AuthenticationError) as caught:
            api.models.list()
        assert caught.value.code == "invalid_api_key"
        with _api(url, KEY) as api:
            return api.completions.create(model="tiny", prompt="x").choices[0].text

    async with served(settings=KEYS) as server, on_socket(server.app) as url:
        assert await asyncio.to_thread(use, url) == "Hello"


async def test_a_body_without_a_key_is_not_kept() -> None:
    async with served(settings=KEYS) as server, on_socket(server.app) as url, httpx.AsyncClient(base_url=url) as http:
        response = await http.post("/v1/completions", content=b" " * (20 << 20))
        assert response.status_code == 401
        assert not server.backend.added


PREFLIGHT = {
    "Origin": "https://app.org",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("origins", [("*",), ("http://localhost:3000", "https://app.org")])
async def test_pages_of_allowed_origins_may_call(origins: tuple[str, ...]) -> None:
    async with served(settings=KEYS | {"cors_origins": origins}) as server:
        asked = await server.http.options("/v1/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] in ("*", "https://app.org")
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in asked.headers
        # The page must see errors too.
        for key, status in ((KEY, 200), ("wrong", 401)):
            headers = {"Origin": "https://app.org", "Authorization": f"Bearer {key}"}
            response = await server.http.get("/v1/models", headers=headers)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] in ("*", "https://app.org")
            assert "x-request-id" in response.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("origins", [(), ("https://other.org",)])
async def test_pages_of_other_origins_may_not(origins: tuple[str, ...]) -> None:
    async with served(settings={"cors_origins": origins}) as server:
        asked = await server.http.options("/v1/completions", headers=PREFLIGHT)
        assert asked.status_code in (400, 405)
        assert "access-control-allow-origin" not in asked.headers
        response = await server.http.get("/v1/models", headers={"Origin": "https://app.org"})
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("a.org", 200),
        ("A.org:8000", 200),
        ("[::1]:80", 200),
        ("[::1]", 200),
        ("b.org", 400),
        ("a.org.evil", 400),
        ("evil:a.org", 400),
        ("a.org:x", 400),
        ("", 400),
        ("x" * 5000, 400),
    ],
)
async def test_the_host_is_checked(host: str, status: int) -> None:
    async with served(settings={"allowed_hosts": ("a.org", "[::1]")}) as server:
        response = await server.http.get("/version", headers={"Host": host})
        assert response.status_code == status
        if status == 400:
            assert error_of(response)["code"] == "host_not_allowed"
            assert len(response.text) < 500


async def test_any_host_without_a_list() -> None:
    async with served() as server:
        assert (await server.http.get("/version", headers={"Host": "evil.org"})).status_code == 200
