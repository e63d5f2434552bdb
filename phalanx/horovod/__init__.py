"""The interface of Horovod 0.28 over Phalanx's own collectives.

import phalanx.horovod.keras as hvd         # or .torch, .tensorflow, .jax, .numpy

knobs, world, basics, process_sets     the job: how it is joined, who is in it
request, negotiation, controller       operations by name, in any order: what is asked for, what can begin
execution, adasum                      how it is done
operations, objects                    what all frameworks share: collectives of arrays, of Python objects
numpy, torch, tensorflow, keras, jax   one for each framework
"""

from __future__ import annotations

from phalanx.horovod.run_function import run

__all__ = ["run"]
