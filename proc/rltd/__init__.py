"""The daemon: supervisor, frontend, engine core and detokenizer processes."""
