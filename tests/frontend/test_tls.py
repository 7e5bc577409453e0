"""The certificate: what is served with it, and what cannot be used."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from frontend.harness import on_socket, served
from frontend.test_socket import connect
from rlt.config import ServerConfig
from rlt.errors import ConfigError
from rltd.frontend.tls import tls_context


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def config(authority: trustme.CA, tmp_path: Path) -> ServerConfig:
    """A certificate for 127.0.0.1 and its key, in two files."""
    issued = authority.issue_cert("127.0.0.1")
    (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    return ServerConfig(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem"))


async def test_https(authority: trustme.CA, config: ServerConfig, caplog: pytest.LogCaptureFixture) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with served() as server, on_socket(server.app, tls_context(config)) as url:
        async with httpx.AsyncClient(base_url=url, verify=trusting) as http:
            body = {"prompt": "x", "stream": True}
            assert (await http.post("/v1/completions", json=body)).text.endswith("data: [DONE]\n\n")
            headers = {"Content-Type": "application/json"}
            assert (await http.post("/v1/completions", content=b" " * (5 << 20), headers=headers)).status_code == 413
        old = ssl.create_default_context()
        authority.configure_trust(old)
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        async with httpx.AsyncClient(base_url=url, verify=old) as http:
            with pytest.raises(httpx.ConnectError):
                await http.get("/health")
        with caplog.at_level(logging.ERROR):
            reader, writer = await connect(url)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in await asyncio.wait_for(reader.read(), 10)
            writer.close()
        assert not caplog.records, "a stray client is nothing to report"


def test_no_certificate_no_context() -> None:
    assert tls_context(ServerConfig()) is None


def problem(config: ServerConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        tls_context(config)
    (line,) = caught.value.problems
    return line


def test_files_that_cannot_be_read(config: ServerConfig, tmp_path: Path) -> None:
    cert, key = Path(config.tls_cert or ""), Path(config.tls_key or "")
    key.rename(tmp_path / "moved.pem")
    assert problem(config) == f"server.tls_key: {key} cannot be read: No such file or directory"
    cert.unlink()
    cert.mkdir()
    assert problem(config) == f"server.tls_cert: {cert} cannot be read: Is a directory"
    assert problem(ServerConfig(tls_cert="a\0b", tls_key="x")).startswith("server.tls_cert: ")


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_key_of_somebody_else(config: ServerConfig) -> None:
    os.chmod(config.tls_key or "", 0)
    assert problem(config) == f"server.tls_key: {config.tls_key} cannot be read: Permission denied"


def test_files_that_are_no_pem(config: ServerConfig) -> None:
    for file in (config.tls_key, config.tls_cert):
        Path(file or "").write_text("hello")
        line = problem(config)
        assert line.startswith(f"{config.tls_cert} and {config.tls_key} (server.tls_cert, server.tls_key) cannot be")
        assert "not a PEM certificate and its PEM key" in line


def test_a_key_of_another_certificate(config: ServerConfig, authority: trustme.CA) -> None:
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(config.tls_key or "")
    assert problem(config).endswith("cannot be used: the key is not the certificate's")


def test_a_key_with_a_password_is_not_asked_for(config: ServerConfig, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(config.tls_key or "").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    Path(config.tls_key or "").write_bytes(locked)
    assert problem(config) == f"server.tls_key: {config.tls_key} needs a password; store the key without one"
