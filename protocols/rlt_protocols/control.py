"""Messages between the supervisor and its children (one socket pair each), and on the control socket."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlt_protocols.codec import Decoder
from rlt_protocols.params import ModelInfo

Role = Literal["frontend", "engine", "detokenizer"]
LogLevel = Literal["debug", "info", "warning", "error"]


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


class AbortAnswer(msgspec.Struct, frozen=True, tag="abort-answer"):
    """Frontend: end the HTTP answer `answer_id`, all its choices, with an error event, then say `Done`."""

    query: int
    answer_id: str


class ResetCache(msgspec.Struct, frozen=True, tag="reset-cache"):
    """Engine: between two ticks, drop the blocks of the prefix cache that no request reads, then say `Done`."""

    query: int


class SetLogLevel(msgspec.Struct, frozen=True, tag="log-level"):
    """Log from now on at this level. The link itself carries it out, also while the process is busy."""

    level: LogLevel


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A command was carried out, on `count` choices (`AbortAnswer`) or pages (`ResetCache`)."""

    query: int
    count: int


FromChild = Hello | Ready | Progress | Fatal | Drained | StatusReply | Done
ToChild = Welcome | Refused | PeerUp | PeerDown | Drain | Stop | StatusQuery | AbortAnswer | ResetCache | SetLogLevel
from_child: Decoder[FromChild] = Decoder(FromChild)
to_child: Decoder[ToChild] = Decoder(ToChild)


class StatusCommand(msgspec.Struct, frozen=True, tag="status"):
    """Tell what the processes do."""


class DrainCommand(msgspec.Struct, frozen=True, tag="drain"):
    """Drain and stop the daemon. `timeout_s` None is the configured limit."""

    timeout_s: float | None = None


class AbortCommand(msgspec.Struct, frozen=True, tag="abort"):
    """End the running HTTP answer with this id."""

    answer_id: str


class CacheResetCommand(msgspec.Struct, frozen=True, tag="cache-reset"):
    """Empty the prefix cache of every engine, as far as no request reads it."""


class LogLevelCommand(msgspec.Struct, frozen=True, tag="log-level"):
    """Set the log level of all processes, restarted ones included, until the daemon ends."""

    level: LogLevel


Command = StatusCommand | DrainCommand | AbortCommand | CacheResetCommand | LogLevelCommand


class ControlVersion(msgspec.Struct, frozen=True, tag="request"):
    """The part of a `ControlRequest` that every version of the protocol has; decoded first."""

    protocol: int


class ControlRequest(msgspec.Struct, frozen=True, tag="request"):
    """One command on the control socket."""

    protocol: int
    command: Command


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
    #: generated since the engines started, and the loops executed for them
    tokens: int = 0
    token_loops: int = 0
    #: choices that an abort ended, pages that a cache reset freed
    count: int = 0


control_version: Decoder[ControlVersion] = Decoder(ControlVersion)
control_request: Decoder[ControlRequest] = Decoder(ControlRequest)
control_reply: Decoder[ControlReply] = Decoder(ControlReply)
