"""Messages between the supervisor and its children (one socket pair each), and on the control socket."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlt_protocols.codec import Decoder
from rlt_protocols.params import ModelInfo

Role = Literal["frontend", "engine", "detokenizer"]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a child. A protocol other than the supervisor's ends the start with a clear error."""

    protocol: int
    version: str
    role: Role
    pid: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The supervisor's answer: who the child is, where its run directory is, and the whole configuration."""

    protocol: int
    role: Role
    index: int
    generation: int
    run_dir: str
    #: MessagePack of `rlt.config.Config`
    config: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hello was not accepted; the child leaves and the supervisor shows `reason`."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child's inbox is bound and it can serve. Engines say what they serve."""

    info: ModelInfo | None = None
    #: where an engine computes, e.g. "cuda:0"; shown to the user
    device: str = ""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far a child's start is: `fraction` (0..1) of `stage` is done."""

    stage: str
    fraction: float


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The child cannot start; `message` is for the user. `usage` errors are not retried and exit with code 2."""

    message: str
    usage: bool


class PeerUp(msgspec.Struct, frozen=True, tag="peer-up"):
    role: Role
    index: int
    generation: int
    info: ModelInfo | None = None


class PeerDown(msgspec.Struct, frozen=True, tag="peer-down"):
    role: Role
    index: int
    generation: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Frontend: take no new requests, finish the running ones within `timeout_s`, then say `Drained`."""

    timeout_s: float


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Nothing is running any more, or the time was up and the rest was ended with an error event."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave now, cleanly."""


class StatusQuery(msgspec.Struct, frozen=True, tag="status?"):
    query: int


class StatusReply(msgspec.Struct, frozen=True, tag="status"):
    """A child's own figures, merged by the supervisor into the reply on the control socket."""

    query: int
    values: dict[str, float | str | dict[str, float]]


FromChild = Hello | Ready | Progress | Fatal | Drained | StatusReply
ToChild = Welcome | Refused | PeerUp | PeerDown | Drain | Stop | StatusQuery
from_child: Decoder[FromChild] = Decoder(FromChild)
to_child: Decoder[ToChild] = Decoder(ToChild)


class ControlRequest(msgspec.Struct, frozen=True, tag="request"):
    """One command on the control socket, e.g. `status` or `drain`."""

    protocol: int
    command: Literal["status", "drain"]
    timeout_s: float | None = None


class ProcessStatus(msgspec.Struct, frozen=True):
    role: str
    pid: int
    #: `hung`: ready, but has not answered for some seconds
    state: Literal["starting", "ready", "hung", "down", "draining"]
    restarts: int


class ControlReply(msgspec.Struct, frozen=True, tag="reply"):
    ok: bool
    message: str = ""
    processes: tuple[ProcessStatus, ...] = ()
    requests: dict[str, int] = {}
    kv: dict[str, int] = {}
    loops_per_token: float | None = None


control_request: Decoder[ControlRequest] = Decoder(ControlRequest)
control_reply: Decoder[ControlReply] = Decoder(ControlReply)
