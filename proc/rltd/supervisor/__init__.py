"""The first process: spawns, watches, drains."""
