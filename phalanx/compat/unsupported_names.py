"""Names of `tf.distribute` that Phalanx does not have, with the alternatives."""

from __future__ import annotations

_RESUMING = "phalanx.callbacks.Checkpoint saves when the job is preempted, and resumes at the exact step."
_ALL_TASKS = "pass a SimpleClusterResolver with the ClusterSpec of all tasks."
_ALTERNATIVES = {
    "phalanx": {
        "CrossDeviceOps": "pass HierarchicalCopyAllReduce() or ReductionToOneDevice(), or leave cross_device_ops out.",
        "DistributedValues": "strategy.run() and reduce() take and return plain values, as each process is one "
        "replica.",
        "RunOptions": "strategy.run() ignores its options; leave them out.",
        "StrategyExtended": "strategies have no `extended` here, as each replica is a separate process.",
        "experimental_set_strategy": "enter the scope of the strategy, `with strategy.scope():`.",
    },
    "phalanx.cluster_resolver": {
        "GCEClusterResolver": _ALL_TASKS,
        "KubernetesExecutableLocation": "pods learn their cluster from variables, see KubernetesClusterResolver.",
    },
    "phalanx.tpu": {"XLAOptions": "set XLA_FLAGS, or leave it out."},
    "phalanx.tpu.experimental": {
        "DeviceAssignment": "ModelParallelStrategy(mesh_shape=...) says which devices share what.",
        "HardwareFeature": "jax.devices()[0].device_kind names the kind of TPU.",
        "TPUSystemMetadata": "initialize_tpu_system() returns a Topology, with num_tasks and num_tpus_per_task.",
        "embedding": "Keras layers keep their embeddings; ShardedStrategy divides them over the devices.",
    },
    "phalanx.experimental": {
        "PreemptionCheckpointHandler": _RESUMING,
        "PreemptionWatcher": _RESUMING,
        "TerminationConfig": "set PHALANX_PREEMPTION_SIGNAL to the signal that announces the preemption.",
        "rpc": "schedule functions with phalanx.coordinator.ClusterCoordinator.",
    },
}


def missing_attribute(module: str, name: str) -> AttributeError:
    """The error for a missing attribute of a module, with the alternative if there is one."""
    alternative = _ALTERNATIVES.get(module, {}).get(name)
    return AttributeError(f"module {module!r} has no attribute {name!r}{f': {alternative}' if alternative else ''}")
