"""A frontend or detokenizer that does nothing but talk to the supervisor: peer.py ROLE [--link-fd N --http-fd N].

It prints every order as one JSON line. The variable FAKE_<ROLE> makes it misbehave.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from queue import SimpleQueue

import msgspec
import zmq

import rltd.link.child
from rlt_protocols import control
from rltd.link.child import ChildLink, LinkError, Order
from rltd.link.inbox import bind_inbox


def serve_http(listener: socket.socket, generation: int) -> None:
    """Answer every connection with the generation of this process."""
    body = json.dumps({"generation": generation, "pid": os.getpid()}).encode()
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def say(**entry: object) -> None:
    print(json.dumps(entry), flush=True)


def main() -> int:
    role = sys.argv[1]
    behaviour = os.environ.get(f"FAKE_{role.upper()}", "")
    if behaviour == "old-version":
        rltd.link.child.__version__ = "0.0.1"
    if behaviour == "crash":
        raise RuntimeError("this process crashes while it starts")
    try:
        link = ChildLink.connect(role, sys.argv[2:])
    except LinkError:
        return 1
    if behaviour.startswith("fatal"):
        link.fatal(f"the {role} says no", usage=behaviour == "fatal-usage")
        return 1
    if behaviour == "dies-later" and link.peer.generation:
        return 1
    if behaviour == "loads-forever":
        threading.Event().wait()
    orders: SimpleQueue[Order] = SimpleQueue()
    with zmq.Context() as context, bind_inbox(context, link.run_dir, link.peer):
        link.watch(orders.put)
        link.ready()
        if link.http_fd is not None:
            listener = socket.socket(fileno=link.http_fd)
            threading.Thread(target=serve_http, args=(listener, link.peer.generation), daemon=True).start()
        while True:
            order = orders.get()
            say(at=time.monotonic(), me=role, order=msgspec.to_builtins(order))
            match order:
                case control.Drain() if behaviour != "never-drains":
                    link.send(control.Drained())
                case control.Stop() if behaviour != "never-stops":
                    print("last words without newline", end="", flush=True)
                    return 0
                case control.AbortAnswer(query, answer_id) if behaviour != "never-answers":
                    link.send(control.Done(query, 2 if answer_id == "cmpl-known" else 0))
                case control.StatusQuery(query) if behaviour != "never-answers":
                    link.send(control.StatusReply(query, {}))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the HTTP thread has no end
