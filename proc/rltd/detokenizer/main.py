"""Entry of the detokenizer process. It never imports torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import zmq

from rlt.errors import RltError
from rlt.models.directory import resolve_model
from rlt.text.tokenizer import Tokenizer, load_tokenizer
from rltd.detokenizer.detokenizer import Detokenizer
from rltd.detokenizer.wire import DetokenizerWire
from rltd.link.child import ChildLink, LinkError
from rltd.link.logs import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Run the detokenizer under a supervisor until told to stop; returns the exit code."""
    try:
        link = ChildLink.connect("detokenizer", argv)
    except LinkError:
        return 1
    configure_logging(link.config.log, "detokenizer")
    try:
        model = link.config.model
        directory = resolve_model(model.path, model.revision, model.load_format)
        tokenizer = load_tokenizer(directory)
    except RltError as error:
        link.fatal(str(error), usage=True)
        return 2
    run(link, tokenizer)
    return 0


def run(link: ChildLink, tokenizer: Tokenizer | None) -> None:
    """Serve until the supervisor says stop."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with DetokenizerWire(context, link.run_dir, link.peer) as wire:
        detokenizer = Detokenizer(tokenizer, wire.to_frontend, wire.to_engine)
        link.watch(wire.put_order)
        link.ready()
        wire.run(detokenizer, link.send)
    context.term()


if __name__ == "__main__":
    sys.exit(main())
