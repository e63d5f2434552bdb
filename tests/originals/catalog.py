"""What the programs in this folder are, and how a test runs each. docs/migration/originals.md has their table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
TENSORFLOW, KERAS, HOROVOD, ARTICLES = "TensorFlow", "Keras", "Horovod", "Articles"
_FOLDERS = {TENSORFLOW: "tensorflow_guides", KERAS: "keras_guides", HOROVOD: "horovod_examples", ARTICLES: "articles"}


@dataclass(frozen=True)
class Original:
    """One program.

    Attributes:
        name: of its file.
        of: whose it is.
        title: of the guide, tutorial or example.
        backend: that Keras runs on.
        options: of `phalanx run`.
        alone: what to replace in the text so that one process trains on the same global batches; None where a program
            of one process would not compute the same.
        quick: whether `make test` runs it.
    """

    name: str
    of: str
    title: str
    backend: str = "tensorflow"
    options: Sequence[str] = ()
    alone: dict[str, str] | None = field(default_factory=dict)
    quick: bool = False

    @property
    def path(self) -> Path:
        return FOLDER / _FOLDERS[self.of] / f"{self.name}.py"

    @property
    def reports(self) -> int:
        """How many processes of two workers report: the other tasks of a coordinator only serve."""
        return 1 if "--chief" in self.options else 2

    @property
    def is_elastic(self) -> bool:
        return self.name.endswith("_elastic")

    @property
    def changed_import(self) -> str:
        """The import line of the original."""
        (was,) = re.findall(r"# was: (.+)", self.path.read_text())
        return str(was)

    @property
    def changes(self) -> list[str]:
        """What differs from the original beside its import."""
        return re.findall(r"# changed: (.+)", self.path.read_text())


PER_REPLICA = {"BATCH_SIZE_PER_REPLICA = 16": "BATCH_SIZE_PER_REPLICA = 32"}

SERVERS = ("--ps", "1", "--chief")

ORIGINALS = [
    Original(
        "distributed_training_guide",
        TENSORFLOW,
        "Distributed training with TensorFlow",
        alone={"BATCH_SIZE_PER_REPLICA = 4": "BATCH_SIZE_PER_REPLICA = 8"},
    ),
    Original("mirrored_keras_tutorial", TENSORFLOW, "Distributed training with Keras", alone=PER_REPLICA),
    Original("custom_training_tutorial", TENSORFLOW, "Custom training with tf.distribute.Strategy", alone=PER_REPLICA),
    Original(
        "multi_worker_with_keras",
        TENSORFLOW,
        "Multi-worker training with Keras",
        alone={"per_worker_batch_size = 16": "per_worker_batch_size = 32"},
    ),
    Original(
        "multi_worker_custom_loop",
        TENSORFLOW,
        "Custom training loop with Keras and MultiWorkerMirroredStrategy",
        alone={"per_worker_batch_size = 16": "per_worker_batch_size = 32"},
        quick=True,
    ),
    Original("save_and_load", TENSORFLOW, "Save and load a model using a distribution strategy", alone=PER_REPLICA),
    Original("distributed_input", TENSORFLOW, "Distributed input", alone=PER_REPLICA),
    Original("parameter_server_fit", TENSORFLOW, "Parameter server training: Model.fit", options=SERVERS, alone=None),
    Original(
        "parameter_server_custom_loop",
        TENSORFLOW,
        "Parameter server training with ClusterCoordinator",
        options=SERVERS,
        alone=None,
    ),
    Original("sidecar_evaluator", TENSORFLOW, "Sidecar evaluation", options=("--evaluator",), alone=PER_REPLICA),
    Original("distributed_training_with_tensorflow", KERAS, "Multi-GPU distributed training with TensorFlow"),
    Original("distributed_training_with_jax", KERAS, "Multi-GPU distributed training with JAX", backend="jax"),
    Original(
        "distributed_training_with_pytorch",
        KERAS,
        "Multi-GPU distributed training with PyTorch",
        backend="torch",
        alone={"batch_size = 16": "batch_size = 32"},
    ),
    Original("strategies_tour", ARTICLES, "strategies, MobileNetV2", alone={"per_replica = 8": "per_replica = 16"}),
    Original("strategies_overview", ARTICLES, "`fit`, custom loop, mixed precision", alone=PER_REPLICA),
    Original("keras_guide_multi_worker", ARTICLES, "several workers, checkpoints, evaluator"),
    Original("keras_mnist", HOROVOD, "examples/keras/keras_mnist.py", backend="jax", alone=None),
    Original(
        "keras_mnist_advanced",
        HOROVOD,
        "examples/keras/keras_mnist_advanced.py, tensorflow2_keras_mnist.py",
        alone=None,
    ),
    Original("tensorflow2_mnist", HOROVOD, "examples/tensorflow2/tensorflow2_mnist.py", alone=None),
    Original(
        "pytorch_mnist",
        HOROVOD,
        "examples/pytorch/pytorch_mnist.py",
        backend="torch",
        alone={
            '"--batch-size", type=int, default=16': '"--batch-size", type=int, default=32',
            "default=0.01": "default=0.02",
        },
        quick=True,
    ),
    Original(
        "pytorch_synthetic_benchmark",
        HOROVOD,
        "examples/pytorch/pytorch_synthetic_benchmark.py",
        backend="torch",
        alone=None,
    ),
    Original(
        "tensorflow2_keras_mnist_elastic",
        HOROVOD,
        "examples/elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py",
        alone=None,
    ),
    Original(
        "tensorflow2_mnist_elastic", HOROVOD, "examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py", alone=None
    ),
    Original(
        "pytorch_mnist_elastic",
        HOROVOD,
        "examples/elastic/pytorch/pytorch_mnist_elastic.py",
        backend="torch",
        alone={
            "BATCH_SIZE, EPOCHS, LR, MOMENTUM = 16, 2, 0.01, 0.5": "BATCH_SIZE, EPOCHS, LR, MOMENTUM = 32, 2, 0.02, 0.5"
        },
    ),
]


def table() -> str:
    """Of docs/migration/originals.md."""
    rows = ["| program | changed import | runs |", "|---|---|---|"]
    for original in ORIGINALS:
        runs = "with this change: " + "; ".join(original.changes) if original.changes else "yes"
        rows.append(f"| {original.of}: {original.title} | `{original.changed_import}` | {runs} |")
    return "\n".join(rows)
