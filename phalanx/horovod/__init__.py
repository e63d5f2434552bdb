"""The interface of Horovod 0.28 on Phalanx's collectives.

import phalanx.horovod.keras as hvd         # or .torch, .tensorflow, .jax, .numpy

horovod_environment, horovod_job, basics, process_sets          the job: how to join it, who is in it
operation_request, negotiation, negotiator, controller          operations by name, in any order: which can start
execution, adasum                                               how operations run
operations, object_collectives                                  the collectives on arrays, on Python objects
framework_bindings, compressors, gradient_reduction             shared by all frameworks
numpy, torch, tensorflow, keras, jax                            the frameworks
"""

from __future__ import annotations

from phalanx.horovod.run_function import run

__all__ = ["run"]
