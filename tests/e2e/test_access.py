"""Keys, TLS and the Unix socket on the real daemon, with the official client."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import trustme

from proc.running import Running, eventually

pytestmark = pytest.mark.e2e

KEY = "rlt-e2e-0123456789abcdef"
HASHED = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()


def answer(api: openai.OpenAI) -> str | None:
    return (
        api.completions.create(model="ouro-tiny", prompt=[5, 9, 12], max_tokens=3, temperature=0)
        .choices[0]
        .finish_reason
    )


def test_keys_behind_tls(start: Callable[..., Running], tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    files = [f"server.tls_cert={tmp_path}/both.pem", f"server.tls_key={tmp_path}/both.pem"]
    run = start(*files, f'server.api_keys=["{HASHED}"]', 'server.allowed_hosts=["127.0.0.1"]').ready()
    url = run.line(r"^rlt .* (https://\S+)$").group(1)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with httpx.Client(base_url=url, verify=trusting) as http:
        assert http.get("/ready", headers={"Host": "anything"}).status_code == 200
        for path in ("/metrics", "/version", "/v1/models", "/nothing"):
            assert http.get(path).status_code == 401
            allowed = {"Authorization": f"Bearer {KEY}"}
            assert http.get(path, headers=allowed).status_code == (404 if path == "/nothing" else 200)
            assert http.get(path, headers=allowed | {"Host": "rebound.example"}).status_code == 400
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=http, max_retries=0) as api:
            assert answer(api) == "length"
            with pytest.raises(openai.AuthenticationError, match="the access key is not known"):
                answer(api.with_options(api_key=KEY[:-1]))
    # A client without TLS, and one that leaves in the middle, are nothing to tell about.
    for data in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01", b""):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as stray:
            stray.sendall(data)
            stray.shutdown(socket.SHUT_WR)
            assert b"200" not in stray.recv(100)
    assert "SSL" not in run.text
    assert "Traceback" not in run.text
    for process in [psutil.Process(run.process.pid), *run.children()]:
        assert KEY not in " ".join(process.cmdline())
    assert KEY not in run.text


def test_a_unix_socket(start: Callable[..., Running], short_dir: Path) -> None:
    path = short_dir / "http.sock"
    run = start(f"server.uds={path}")
    # The socket is there before the model is.
    run.line(rf"^rlt \S+  starting \S+ at unix:{path}$")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    run.ready()
    with (
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http,
        openai.OpenAI(base_url="http://rlt/v1", api_key="none", http_client=http, max_retries=0) as api,
    ):
        assert answer(api) == "length"
    os.kill(run.pid("frontend"), signal.SIGKILL)
    run.line("all processes are ready again")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://rlt") as http:
        assert eventually(lambda: http.get("/ready").status_code == 200, "the new frontend answers")
    connections = psutil.Process(run.process.pid).net_connections("tcp")
    assert not [c for c in connections if c.status == psutil.CONN_LISTEN], "no port beside it"
    run.process.terminate()
    assert run.wait() == 0
    assert not path.exists()


def test_start_and_check_refuse_a_certificate_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    sets = ["--set", f"server.tls_cert={tmp_path}/cert.pem", "--set", f"server.tls_key={tmp_path}/key.pem"]
    for command in ("start", "check"):
        done = subprocess.run(
            [sys.executable, "-m", "rltd.main", command, *sets], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: server.tls_key: {tmp_path}/key.pem cannot be read: No such file or directory\n"
