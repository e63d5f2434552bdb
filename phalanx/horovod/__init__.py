"""The interface of Horovod 0.28 over Phalanx's own collectives.

import phalanx.horovod.keras as hvd         # or .torch, .tensorflow, .jax, .numpy

horovod_environment, horovod_job, basics, process_sets          the job: how it is joined, who is in it
operation_request, negotiation, negotiator, controller          operations by name, in any order: what can begin
execution, adasum                                               how operations run
operations, object_collectives                                  the collectives on arrays, on Python objects
bindings, compression, gradient_reduction                       what the frameworks share
numpy, torch, tensorflow, keras, jax                            the frameworks
"""

from __future__ import annotations

from phalanx.horovod.run_function import run

__all__ = ["run"]
