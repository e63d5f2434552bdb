"""Picks the resolver that matches how this process was started.

To add one, write a module with a `ClusterResolver` and add a line to `_CHOICES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.resolvers.kubernetes import KubernetesClusterResolver, started_by_kubernetes
from phalanx.cluster.resolvers.mpi import MPIClusterResolver, started_by_mpi
from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.resolvers.slurm import SlurmClusterResolver
from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import TF_CONFIG
from phalanx.errors import ConfigurationError

logger = logging.getLogger(__name__)

_Environ = Mapping[str, str]


def _in_open_mpi(environ: _Environ) -> bool:
    return "OMPI_COMM_WORLD_RANK" in environ


def _in_slurm_step(environ: _Environ) -> bool:
    return "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ


_CHOICES: tuple[tuple[Callable[[_Environ], bool], Callable[..., ClusterResolver]], ...] = (
    # An explicit description comes first.
    (lambda environ: bool(environ.get(TF_CONFIG)), TFConfigClusterResolver),
    # mpirun inside a Slurm job starts its daemons with srun, so Slurm's variables describe the daemons.
    (_in_open_mpi, MPIClusterResolver),
    # srun may also set PMI's variables, but only Slurm's variables include the hosts.
    (_in_slurm_step, SlurmClusterResolver),
    (started_by_mpi, MPIClusterResolver),
    (started_by_kubernetes, KubernetesClusterResolver),
)


def as_resolver(given: Any) -> ClusterResolver:
    """Return the resolver for the `cluster_resolver` argument of a strategy; the result of `resolve` for None.

    TensorFlow's resolvers are queried once and copied.

    Raises: ConfigurationError if `given` is not a resolver.
    """
    if given is None:
        return resolve()
    if isinstance(given, ClusterResolver):
        return given
    if not all(hasattr(given, name) for name in ("cluster_spec", "task_type", "task_id")):
        raise ConfigurationError(
            f"cluster_resolver is {given!r}, which is not a cluster resolver. Pass one of Phalanx's "
            f"(`phalanx.TFConfigClusterResolver()`), or leave it out."
        )
    return SimpleClusterResolver(ClusterSpec(given.cluster_spec()), task_type=given.task_type, task_id=given.task_id)


def resolve(environ: _Environ | None = None) -> ClusterResolver:
    """Return the resolver for the way this process was started.

    The order is TF_CONFIG, Open MPI, Slurm, other MPI launchers, Kubernetes, detected by the variables that each of
    them sets. Without any of these, the result has an empty cluster: the process trains alone.

    Args:
        environ: The variables to examine; the process's environment if not given.

    Raises: ConfigurationError if torchrun or horovodrun has started several processes: each would train alone.
    """
    environ = process_environment() if environ is None else environ
    for fits, kind in _CHOICES:
        if fits(environ):
            resolver = kind(environ=environ)
            logger.debug("the cluster is resolved by %s", type(resolver).__name__)
            return resolver
    _refuse_other_launchers(environ)
    return SimpleClusterResolver(ClusterSpec({}))


# Unsupported launchers and the variables that they set, the number of processes first.
_OTHER_LAUNCHERS = (
    ("torchrun", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"),
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
)


def _refuse_other_launchers(variables: _Environ) -> None:
    for launcher, *names in _OTHER_LAUNCHERS:
        size = variables.get(names[0], "")
        if all(name in variables for name in names) and size.isdecimal() and size not in ("0", "1"):
            found = ", ".join(f"{name}={variables[name]}" for name in names)
            raise ConfigurationError(
                f"This process was started by {launcher} ({found}), whose processes cannot find each other here: each "
                f"would train alone. Start the program with `phalanx run --workers {size} ...` instead, or describe "
                f"the cluster in TF_CONFIG."
            )
