"""Tokenizers, chat templates and incremental detokenization; no torch here."""
