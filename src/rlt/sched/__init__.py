"""Requests, scheduling and tick plans; no torch here."""
