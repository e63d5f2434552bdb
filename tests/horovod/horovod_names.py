"""The public names of Horovod 0.28.1, by module, and what of them is not here.

Without what its modules import for themselves; `start_timeline` and `stop_timeline` are tested with the timeline.
"""

from __future__ import annotations

BASICS = """
    ProcessSet add_process_set ccl_built cross_rank cross_size cuda_built ddl_built global_process_set gloo_built
    gloo_enabled init is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank
    remove_process_set rocm_built shutdown size
"""
NAMES = {
    "": "run",
    "torch": BASICS
    + """
        Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min Product Sum SyncBatchNorm allgather
        allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async
        barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object broadcast_optimizer_state
        broadcast_parameters elastic grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_
        grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async join poll
        reducescatter reducescatter_async sparse_allreduce_async synchronize
    """,
    "torch.elastic": "ElasticSampler TorchState run",
    "torch.elastic.state": """
        ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler TorchState get_handler_registry
        set_handler_registry
    """,
    "torch.elastic.sampler": "ElasticSampler",
    "torch.compression": "Compression Compressor FP16Compressor NoneCompressor",
    "torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "torch.optimizer": "DistributedOptimizer",
    "torch.sync_batch_norm": "SyncBatchNorm",
    "tensorflow": BASICS
    + """
        Adasum Average BroadcastGlobalVariablesHook Compression DistributedGradientTape DistributedOptimizer Max Min
        PartialDistributedGradientTape Product Sum SyncBatchNormalization allgather allgather_object allreduce alltoall
        broadcast broadcast_ broadcast_global_variables broadcast_object broadcast_object_fn broadcast_variables
        check_num_rank_power_of_2 elastic grouped_allgather grouped_allreduce grouped_reducescatter is_homogeneous join
        local_rank_op local_size_op process_set_included_op rank_op reducescatter size_op
    """,
    "tensorflow.elastic": "TensorFlowKerasState TensorFlowState run",
    "tensorflow.compression": "Compression Compressor FP16Compressor NoneCompressor",
    "tensorflow.functions": "allgather_object broadcast_object broadcast_object_fn broadcast_variables",
    "keras": BASICS
    + """
        Average Compression DistributedOptimizer PartialDistributedOptimizer Sum allgather allreduce broadcast
        broadcast_global_variables callbacks elastic grouped_allgather grouped_allreduce grouped_reducescatter
        load_model reducescatter
    """,
    "keras.callbacks": """
        BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback LearningRateWarmupCallback
        MetricAverageCallback
    """,
    "keras.elastic": "CommitStateCallback KerasState UpdateBatchStateCallback UpdateEpochStateCallback run",
    "common.exceptions": "HorovodInternalError HostsUpdatedInterrupt",
    "common.elastic": "ObjectState State",
    "common.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
}
# The same under another name; its `elastic` has no `run` of its own.
NAMES["tensorflow.keras"] = NAMES["keras"]
NAMES["tensorflow.keras.callbacks"] = NAMES["keras.callbacks"]
NAMES["tensorflow.keras.elastic"] = NAMES["keras.elastic"]

_REDUCTION = "prescale_factor=1.0 postscale_factor=1.0"
_TORCH = {
    "allreduce": f"average=None name=None compression=none op=None {_REDUCTION} process_set=all",
    "allreduce_async": f"average=None name=None op=None {_REDUCTION} process_set=all",
    "allgather": "name=None process_set=all",
    "broadcast": "root_rank name=None process_set=all",
    "alltoall": "splits=None name=None process_set=all",
    "reducescatter": f"name=None compression=none op=Average process_set=all {_REDUCTION}",
    "reducescatter_async": f"name=None op=Average process_set=all {_REDUCTION}",
}
_TORCH_FORMS = {
    "allreduce": "allreduce grouped_allreduce",
    "allreduce_async": """allreduce_ allreduce_async allreduce_async_ grouped_allreduce_ grouped_allreduce_async
        grouped_allreduce_async_""",
    "allgather": "allgather allgather_async grouped_allgather grouped_allgather_async",
    "broadcast": "broadcast broadcast_ broadcast_async broadcast_async_",
    "alltoall": "alltoall alltoall_async",
    "reducescatter": "reducescatter grouped_reducescatter",
    "reducescatter_async": "reducescatter_async grouped_reducescatter_async",
}
_DEVICES = "device_dense='' device_sparse=''"
SIGNATURES = {
    "torch": {
        form: f"{'tensors' if form.startswith('grouped') else 'tensor'} {_TORCH[verb]}"
        for verb, forms in _TORCH_FORMS.items()
        for form in forms.split()
    },
    "tensorflow": {
        "allreduce": f"tensor average=None {_DEVICES} compression=none op=None {_REDUCTION} name=None process_set=all "
        "ignore_name_scope=False",
        "grouped_allreduce": f"tensors average=None {_DEVICES} compression=none op=None {_REDUCTION} process_set=all "
        "ignore_name_scope=False name=None",
        "allgather": "tensor name=None ignore_name_scope=False process_set=all",
        "grouped_allgather": "tensors name=None ignore_name_scope=False process_set=all",
        "broadcast": "tensor root_rank name=None ignore_name_scope=False process_set=all",
        "broadcast_": "variables root_rank name=None process_set=all",
        "alltoall": "tensor splits=None name=None ignore_name_scope=False process_set=all",
        "reducescatter": "tensor device_dense='' compression=none op=Average name=None process_set=all "
        f"ignore_name_scope=False {_REDUCTION}",
        "grouped_reducescatter": f"tensors device_dense='' compression=none op=Average process_set=all {_REDUCTION}",
    },
    "keras": {
        "allreduce": f"value name=None average=None {_REDUCTION} op=None compression=none",
        "allgather": "value name=None",
        "broadcast": "value root_rank name=None",
        "reducescatter": "value name=None op=Average",
    },
}
"""The first parameters of the collectives, as inspect.signature shows them; Phalanx may have more after them."""

NOT_HERE = {
    f"{module}.broadcast_global_variables": "acts on the session of TensorFlow 1 that Keras 2 had"
    for module in ("keras", "tensorflow.keras")
}
"""Names that are left out on purpose, with the reason."""

FALSE = [
    "mpi_built",
    "mpi_enabled",
    "gloo_built",
    "gloo_enabled",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
]
"""What is asked of the libraries that collectives are built on: none of them."""
