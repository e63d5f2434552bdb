"""Collectives: communicators between the members of one generation."""

from phalanx.collectives.communicator import Communicator, Handle, ReduceOp
from phalanx.collectives.communicator_factory import connect
from phalanx.collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from phalanx.collectives.options import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Communicator",
    "CrossDeviceOps",
    "Handle",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "connect",
]
