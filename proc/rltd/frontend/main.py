"""Entry of the frontend process: HTTP in front of the engines. It never imports torch."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop
import zmq

from rlt.config import Config
from rlt.errors import RltError
from rlt.models.directory import resolve_model
from rlt.text.chat import load_chat_template
from rlt.text.reasoning import check_thinking
from rlt.text.tokenizer import load_tokenizer
from rlt_protocols.control import PeerUp
from rltd.frontend.app import Api
from rltd.frontend.engine_client import EngineClient
from rltd.frontend.inbox import InboxReader
from rltd.frontend.metrics import Metrics
from rltd.frontend.prepare import Preparer
from rltd.frontend.process import Frontend
from rltd.frontend.server import listening_socket, make_server
from rltd.frontend.tls import tls_context
from rltd.link.child import ChildLink, LinkError, Order
from rltd.link.inbox import bind_inbox
from rltd.link.logs import configure_logging
from rltd.link.outbox import Outboxes

#: Threads that parse, render and tokenize; only the last can take seconds, and it runs without the interpreter lock.
WORKERS = min(4, os.cpu_count() or 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the frontend under a supervisor until told to stop; returns the exit code."""
    try:
        link = ChildLink.connect("frontend", argv)
    except LinkError:
        return 1
    configure_logging(link.config.log, "frontend")
    try:
        preparer = load_preparer(link.config)
        tls = tls_context(link.config.server)
    except RltError as error:
        link.fatal(str(error), usage=True)
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(link, preparer, tls))
    return 0


def load_preparer(config: Config) -> Preparer:
    """Read the model's tokenizer and chat template. Raises `ModelError`."""
    directory = resolve_model(config.model.path, config.model.revision, config.model.load_format)
    override = Path(config.model.chat_template) if config.model.chat_template is not None else None
    template = load_chat_template(directory, override)
    check_thinking(config.model.enable_thinking, template)
    return Preparer(
        load_tokenizer(directory),
        template,
        max_answers=config.server.max_queue,
        enable_thinking=config.model.enable_thinking,
        reasoning=config.model.reasoning,
    )


async def _serve(link: ChildLink, preparer: Preparer, tls: ssl.SSLContext | None) -> None:
    assert link.http_fd is not None, "the supervisor gives the frontend its socket"
    config = link.config.server
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = bind_inbox(context, link.run_dir, link.peer)
    with Outboxes(context, link.run_dir) as outboxes, ThreadPoolExecutor(WORKERS, "prepare") as workers:
        metrics = Metrics()
        client = EngineClient(
            outboxes.send, link.peer.generation, metrics, max_queue=config.max_queue, drop=outboxes.drop
        )
        api = Api(client, preparer, metrics, workers, config)
        server = make_server(api.app(), tls)
        serving = asyncio.create_task(server.serve(sockets=[listening_socket(link.http_fd)]))

        async def stop_serving() -> None:
            server.should_exit = True
            await serving

        frontend = Frontend(client, link.send, stop_serving)
        reader = InboxReader(inbox, frontend.on_message)

        def carry_out(order: Order) -> None:
            if isinstance(order, PeerUp):
                # At once: a first message must not depend on a run directory that may be gone by then.
                outboxes.connect(order.role, order.index, order.generation)
            frontend.on_order(order)

        def on_order(order: Order) -> None:
            loop.call_soon_threadsafe(carry_out, order)

        link.watch(on_order)
        link.ready()
        running = asyncio.create_task(frontend.run())
        await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises what ended the server, unless a drain did
        await running
        reader.close()
    inbox.close()
    context.term()


if __name__ == "__main__":
    sys.exit(main())
