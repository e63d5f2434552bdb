"""Bytes between processes: links, the handshake that opens them, and the one port of a task."""
