"""Tasks without a program of their own, where a test asks for them."""

from __future__ import annotations

import os

import phalanx

SERVERS = {"TEST_SERVERS": "1"}
"""The environment of tasks of which only the chief runs the program."""


def serve_if_asked() -> None:
    """On workers and parameter servers of such a job: serve, and do not return."""
    if "TEST_SERVERS" not in os.environ:
        return
    resolver = phalanx.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        phalanx.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol=resolver.rpc_layer or "grpc",
            start=True,
        ).join()
