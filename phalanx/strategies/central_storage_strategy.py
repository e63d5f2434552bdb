"""`CentralStorageStrategy`: `MirroredStrategy` with the arguments of its `tf.distribute.experimental` namesake."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.cluster.spec import PS
from phalanx.config.environment import process_environment
from phalanx.devices.gpu_assignment import same_device
from phalanx.devices.replica_devices import resolve_devices
from phalanx.errors import ConfigurationError
from phalanx.strategies.mirrored_strategy import REPLICAS, MirroredStrategy


class CentralStorageStrategy(MirroredStrategy):
    """Synchronous training on several devices of this host (`tf.distribute.experimental.CentralStorageStrategy`).

    The original stores the variables on one device, from which all devices read them in every step. Here, each replica
    has a copy and makes the same update, as with `MirroredStrategy`: the numbers are equal, and no weights are sent.
    Each replica is a process, so each needs memory for the optimizer's state.

    Under `phalanx run` on one host, the workers are the replicas.

    Args:
        compute_devices: Number of replicas, or one device for each: ["cpu:0", "cpu:1"], ["/gpu:0", "/gpu:1"]. None:
            one for each GPU, or a single replica if there is no GPU.
        parameter_device: Device that stores the variables: the first replica's, which is the default; no other.

    Raises: ConfigurationError in a job on several hosts; in a job that has parameter servers.
    """

    def __init__(self, compute_devices: int | Sequence[str] | None = None, parameter_device: str | None = None):
        devices = resolve_devices(compute_devices, "CentralStorageStrategy", process_environment())
        if parameter_device is not None and not same_device(parameter_device, devices[0]):
            raise ConfigurationError(
                f"parameter_device is {parameter_device!r}; the first replica stores the variables, on {devices[0]}. "
                f"Leave it out, or name that device first in compute_devices."
            )
        if any(task.type == PS for task in TFConfigClusterResolver().cluster_spec().tasks):
            raise ConfigurationError(
                "CentralStorageStrategy keeps the variables in its replicas, and this job has parameter servers. "
                "Start it without `--ps`, or use ParameterServerStrategy."
            )
        super().__init__(compute_devices, engine=REPLICAS)
        hosts = self.job.membership.hosts
        if len(hosts) > 1:
            raise ConfigurationError(
                f"CentralStorageStrategy is for one host, and this job runs on {', '.join(hosts)}. Use "
                f"ParameterServerStrategy, or MultiWorkerMirroredStrategy."
            )
