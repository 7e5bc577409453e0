"""Command lines of the `rlt` program."""
