"""`MirroredStrategy`: trains on the devices of this host, with replicas that the program starts or as one program."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.collectives.cross_device_ops import CrossDeviceOps, cross_device_ops_of
from phalanx.compression import Compression
from phalanx.compression import resolve as resolve_compression
from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import DEVICES_PER_WORKER, JOB_ID, LOCAL_REPLICAS
from phalanx.devices.devices_per_worker import check_single_device
from phalanx.devices.gpu_count import count_gpus
from phalanx.devices.replica_devices import resolve_devices
from phalanx.devices.tpu_count import count_tpus
from phalanx.engines.spmd.placement import Placement
from phalanx.errors import ConfigurationError
from phalanx.launcher.local_replicas import is_program, start_local_replicas
from phalanx.strategies.current_job import join_job
from phalanx.strategies.device_meshes import mirrored_placement
from phalanx.strategies.interactive_replicas import InteractiveReplicas
from phalanx.strategies.spmd_job import join_spmd_job, with_mesh
from phalanx.strategies.strategy import Strategy
from phalanx.training.training_policy import TrainingPolicy

SPMD, REPLICAS = "spmd", "replicas"


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of this host (`tf.distribute.MirroredStrategy`).

    With `engine="replicas"`, each replica is a process: the first one, which the user started, runs the same program
    again for the others, which print only errors to the terminal. Under `phalanx run`, the workers are the replicas.
    With `engine="spmd"`, on JAX, one compiled program spans all devices: of one process, even in a notebook, or of the
    workers of `phalanx run --devices-per-worker`.

    In a notebook, an interactive session or a test, there is no program to rerun. There, the other replicas repeat this
    process's calls of `fit`, `evaluate`, `predict` and the single-batch methods, with copies of the model and the
    arguments. An interrupt ends them, and the next call starts new ones; the weights are kept. Custom training loops
    need a function for `phalanx.launch`.

    Args:
        devices: A number of replicas, or one device for each: ["cpu:0", "cpu:1"], ["/gpu:0", "/gpu:1"]. None: one for
            each GPU, or a single replica if there is none; with `engine="spmd"`, all devices that JAX sees.
        cross_device_ops: Algorithm that merges gradients. None: the fastest.
        compression: See `MultiWorkerMirroredStrategy`. Saves no time on one host.
        engine: "replicas" or "spmd". None: "spmd" if `devices` is omitted, Keras runs on JAX, no argument requires
            replicas, and this process alone has several accelerators or `phalanx run` was given
            `--devices-per-worker`; else "replicas".
        synchronized_batch_norm: See `MultiWorkerMirroredStrategy`. Always on with `engine="spmd"`.

    Raises:
        ConfigurationError: devices do not exist; arguments for replicas with `engine="spmd"`; this process is a task of
            another job.
        UnsupportedError: `engine="spmd"`, and Keras does not run on JAX.
    """

    def __init__(
        self,
        devices: int | Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        engine: str | None = None,
        compression: Compression | str | None = None,
        synchronized_batch_norm: bool = False,
    ):
        needs_replicas = cross_device_ops is not None or compression is not None  # as only replicas do
        if engine is None:
            engine = SPMD if devices is None and not needs_replicas and _prefers_spmd() else REPLICAS
        if engine not in (SPMD, REPLICAS):
            raise ConfigurationError(f"MirroredStrategy(engine={engine!r}): it is {SPMD!r} or {REPLICAS!r}.")
        if engine == SPMD:
            replica = join_spmd_job("MirroredStrategy(engine='spmd')", TFConfigClusterResolver())
            placement = _place(devices, needs_replicas=needs_replicas)
            super().__init__(with_mesh(replica, placement), policy=TrainingPolicy(placement=placement))
            return
        name = type(self).__name__
        check_single_device(f"{name} with replicas", process_environment())
        policy = TrainingPolicy(resolve_compression(compression), synchronized_batch_norm=synchronized_batch_norm)
        ops = cross_device_ops_of(cross_device_ops)
        self._devices = resolve_devices(devices, name, process_environment())
        is_started = JOB_ID in process_environment()  # by a launcher, or by the user's own process
        if not is_started and len(self._devices) > 1 and not is_program():
            self.job = _session_replicas(self._devices).job
            if ops is not None:
                self.job.replica.cross_device_ops = ops
            super().__init__(self.job.replica, self.job.resolver, policy)
            return
        if not is_started or LOCAL_REPLICAS in process_environment():
            start_local_replicas(self._devices)
        resolver = TFConfigClusterResolver()  # not from a scheduler, whose other processes are not part of the job
        workers = len(resolver.cluster_spec().ranked_tasks)
        if devices is not None and workers > 1 and len(self._devices) != workers:
            raise ConfigurationError(
                f"{name} was given {len(self._devices)} devices, and the job was started with {workers} "
                f"workers. Leave the devices out, or give `phalanx run --workers` the same number."
            )
        self.job = join_job(resolver, None, ops)
        super().__init__(self.job.replica, resolver, policy)

    @property
    def local_devices(self) -> tuple[str, ...]:
        if self.placement is not None:
            return super().local_devices
        return (self._devices[min(self.rank, len(self._devices) - 1)],)


def _prefers_spmd() -> bool:
    """Whether Keras runs on JAX and the launcher started the processes for one program, or this is the only process and
    sees several GPUs, or TPUs (a chip may be two devices)."""
    environment = process_environment()
    if keras.backend.backend() != "jax":
        return False
    if JOB_ID in environment:
        return DEVICES_PER_WORKER in environment
    return count_gpus(environment) > 1 or count_tpus() > 0


def _place(devices: int | Sequence[str] | None, *, needs_replicas: bool) -> Placement:
    """The placement of one compiled program over the devices."""
    if needs_replicas:
        raise ConfigurationError(
            "MirroredStrategy(engine='spmd') compiles one program, into which XLA puts the sums of gradients: "
            "cross_device_ops and compression say how replicas merge theirs. Leave them out, or write "
            "engine='replicas'."
        )
    return mirrored_placement(devices)


_interactive_replicas: InteractiveReplicas | None = None  # of the interactive session


def _session_replicas(devices: list[str]) -> InteractiveReplicas:
    """The replicas of this session, reused when a cell is run again."""
    global _interactive_replicas
    if _interactive_replicas is not None and _interactive_replicas.devices != devices:
        _interactive_replicas.replace()
        _interactive_replicas = None
    if _interactive_replicas is None:
        _interactive_replicas = InteractiveReplicas(devices, lambda: join_job(TFConfigClusterResolver(), None))
    return _interactive_replicas
