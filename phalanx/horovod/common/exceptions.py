"""`from phalanx.horovod.common.exceptions import HorovodInternalError`, as programs for Horovod write it."""

from __future__ import annotations

from phalanx.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
