"""`tests.parameter_server.program`, whose tasks reach each other through relays.

$CABLES is JSON, `{task: {address: relay}}`: where a task connects instead.
"""

from __future__ import annotations

import json
import os
from typing import Any

from phalanx.cluster.task_identity import TaskIdentity
from phalanx.transport.address import Address
from tests.parameter_server import program

_dial = TaskIdentity.dial_address


def _dial_relay(me: TaskIdentity, address: Address, *arguments: Any, **options: Any) -> Any:
    relays = json.loads(os.environ["CABLES"])[me.description.task]
    relay = Address.parse(relays.get(str(address), str(address)), where="CABLES")
    return _dial(me, relay, *arguments, **options)


if __name__ == "__main__":
    TaskIdentity.dial_address = _dial_relay  # type: ignore[method-assign]
    program.main()
