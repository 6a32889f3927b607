"""Bindings to native libraries through cffi in ABI mode; nothing else lives here."""
