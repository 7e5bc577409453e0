"""Paged key/value storage by (request, plane)."""
