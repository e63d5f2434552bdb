"""Names of `tf.distribute` that Phalanx does not implement, with alternatives."""

from __future__ import annotations

_ALTERNATIVES = {
    "phalanx": {
        "CrossDeviceOps": "pass HierarchicalCopyAllReduce() or ReductionToOneDevice(), or leave cross_device_ops out.",
        "DistributedValues": "strategy.run() and reduce() take and return plain values, as each process is one "
        "replica.",
    },
    "phalanx.compat.v1": {
        "contrib": "tf.contrib ended with TensorFlow 1; much of it is in tf-slim and tensorflow-probability.",
        "estimator": "TensorFlow has no estimators since 2.16. Build the model in the graph and train it with "
        "tf.train.MonitoredTrainingSession, or write it with Keras for phalanx.ParameterServerStrategy.",
        "examples": "load MNIST with tf.keras.datasets.mnist.load_data().",
    },
    "phalanx.compat.v1.layers": {
        **dict.fromkeys(
            ("AveragePooling2D", "BatchNormalization", "Conv2D", "Dense", "Dropout", "Flatten", "MaxPooling2D"),
            "call the function of that name, as tf.layers.dense(inputs, units).",
        ),
        **dict.fromkeys(
            ("conv1d", "conv2d_transpose", "conv3d", "max_pooling1d", "max_pooling3d", "separable_conv2d"),
            "call the operation of tf.nn, with variables from tf.get_variable().",
        ),
    },
    "phalanx.tpu.experimental": {
        "DeviceAssignment": "ModelParallelStrategy(mesh_shape=...) says which devices share what.",
        "HardwareFeature": "jax.devices()[0].device_kind names the kind of TPU.",
        "TPUSystemMetadata": "initialize_tpu_system() returns a Topology, with num_tasks and num_tpus_per_task.",
        "embedding": "Keras layers keep their embeddings; ShardedStrategy divides them over the devices.",
    },
    "phalanx.experimental": {
        "PreemptionWatcher": "PreemptionCheckpointHandler saves when a worker is preempted; in fit, "
        "phalanx.callbacks.Checkpoint does, and resumes at the exact step.",
        "rpc": "schedule functions with phalanx.coordinator.ClusterCoordinator.",
    },
}

_MEMBERS = {
    "Strategy": {
        "colocate_vars_with": "a replica's variables are all in its own process.",
        "configure": "pass a cluster_resolver when you create the strategy.",
        "experimental_assign_to_logical_device": "ModelParallelStrategy divides layers over devices by layout.",
        "experimental_replicate_to_logical_devices": "ModelParallelStrategy divides layers over devices by layout.",
        "experimental_run": "call strategy.run(fn, args=(next(iterator),)).",
        "experimental_split_to_logical_devices": "ModelParallelStrategy divides layers over devices by layout.",
        "group": "operations run when they are called; leave group() out.",
        "make_dataset_iterator": "iterate strategy.experimental_distribute_dataset(dataset).",
        "make_input_fn_iterator": "iterate strategy.distribute_datasets_from_function(dataset_fn).",
        "unwrap": "call strategy.experimental_local_results(value).",
        "update_config_proto": "there are no sessions; leave it out.",
    },
    "StrategyExtended": {
        "experimental_make_numpy_dataset": "pass the arrays to fit, or make a tf.data.Dataset of them.",
        "experimental_run_steps_on_iterator": "call strategy.run(fn, args=(next(iterator),)) for each step.",
        "num_hosts": "len(strategy.cluster_resolver.cluster_spec().ranked_tasks) is the number of tasks.",
        "num_replicas_per_host": "strategy.num_replicas_in_sync counts the replicas of all hosts.",
    },
    "TPUClusterResolver": {
        "get_coordination_service_leader": "phalanx needs no coordination service.",
        "get_job_name": "task_type names the job.",
        "get_master": "call master().",
        "get_tpu_system_metadata": "phalanx.tpu.experimental.initialize_tpu_system() returns a Topology.",
        "set_tpu_topology": "phalanx.tpu.experimental.initialize_tpu_system() finds the topology.",
        "tpu_hardware_feature": "jax.devices()[0].device_kind names the kind of TPU.",
    },
}


def missing_member(kind: str, owner: object, name: str) -> AttributeError:
    """The error for a missing attribute of an object of a `tf.distribute` class, with the alternative if any."""
    alternative = _MEMBERS[kind].get(name)
    return AttributeError(
        f"{type(owner).__name__!r} object has no attribute {name!r}{f': {alternative}' if alternative else ''}"
    )


def missing_attribute(module: str, name: str) -> AttributeError:
    """The error for a missing attribute of a module, with the alternative if there is one."""
    alternative = _ALTERNATIVES.get(module, {}).get(name)
    return AttributeError(f"module {module!r} has no attribute {name!r}{f': {alternative}' if alternative else ''}")
