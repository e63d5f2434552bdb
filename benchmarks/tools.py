"""The two tables of the comparison: the tools, and the bars that each must meet."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.work import APART, TOGETHER

# The bars were set on two cores with two workers, so a machine with more cores uses only two of them.
CORES = 2
PROCESSES = 2

# The only work that is not a training job. Its cases are sizes in bytes.
ALL_REDUCE = "all-reduce"
# In a tool's arguments: path of the file for its figures, for tools that do not read BENCH_RESULT.
RESULT_FILE = "{result}"


class Kind(enum.Enum):
    """How a tool's job is started."""

    PHALANX = "phalanx run starts the workers"
    PEER = "one process for each rank, in the environment of the peers"
    SINGLE = "one process, without any distribution"
    COLLECTIVE = "one process that starts the ranks and times a collective instead of a training"


class Share(enum.Enum):
    """Which cores a process may use."""

    OWN = "a core each"
    ALL = "all cores"
    ONE = "one core"


@dataclass(frozen=True)
class Tool:
    """One way to train, timed on every work.

    Attributes:
        name: Short name without spaces, which `--only` and the bars refer to.
        module: Module to run, with `arguments` and those of every timed script.
        backend: KERAS_BACKEND, if the script does not set it.
        works: Names of the works that it is timed on.
        servers: Number of parameter servers in addition to the workers.
        workers: Number of processes that train together.
        launched_by: Command before the interpreter.
        paired_with: Name of the tool whose figures the same process measures in alternation.
    """

    name: str
    title: str
    kind: Kind
    share: Share
    module: str
    arguments: tuple[str, ...] = ()
    backend: str | None = None
    works: tuple[str, ...] = TOGETHER
    launched_by: tuple[str, ...] = ()
    paired_with: str | None = None
    servers: int = 0
    workers: int = PROCESSES

    @property
    def needs_peers(self) -> bool:
        """Whether it needs the peers' environment."""
        return ".peers." in self.module

    @property
    def ranks(self) -> int:
        """Number of processes that train together."""
        return 1 if self.kind is Kind.SINGLE else self.workers

    @property
    def starts(self) -> int:
        """Number of processes to start; they start the rest."""
        return self.workers if self.kind is Kind.PEER else 1


TITLES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}


def _phalanx(backend: str) -> Tool:
    return Tool(
        f"phalanx-{backend}",
        f"Phalanx, Keras fit on {TITLES[backend]}",
        Kind.PHALANX,
        Share.OWN,
        "benchmarks.fit",
        ("--strategy", "MultiWorkerMirroredStrategy"),
        backend=backend,
    )


def _deterministic(backend: str) -> Tool:
    """Tool that measures the cost of getting the same bits with any number of workers."""
    return replace(
        _phalanx(backend),
        name=f"deterministic-{backend}",
        title=f"Phalanx deterministic, Keras fit on {TITLES[backend]}",
        arguments=("--strategy", "MultiWorkerMirroredStrategy", "--deterministic"),
        works=("mlp64", "mlp512"),
    )


def _horovod(backend: str) -> Tool:
    return Tool(
        f"hvd-keras-{backend}",
        f"Phalanx's Horovod, Keras fit on {TITLES[backend]}",
        Kind.PHALANX,
        Share.OWN,
        "benchmarks.horovod_keras",
        backend=backend,
    )


def _keras(backend: str, share: Share) -> Tool:
    suffix = "" if share is Share.ALL else "-one-core"
    title = f"one process, Keras fit on {TITLES[backend]}, {share.value}"
    return Tool(f"keras-{backend}{suffix}", title, Kind.SINGLE, share, "benchmarks.fit", backend=backend)


def _apart(backend: str) -> Tool:
    """Upper limit for replicas: as if merging cost nothing."""
    title = f"(two processes of Keras on {TITLES[backend]}, half a batch each, that merge nothing)"
    return Tool(f"apart-{backend}", title, Kind.PHALANX, Share.OWN, "benchmarks.fit", ("--apart",), backend=backend)


def _apart_among_servers(backend: str) -> Tool:
    """Upper limit for workers: as if servers and their connections cost only the optimizer's step."""
    return replace(
        _apart(backend),
        name=f"apart-servers-{backend}",
        title=f"(two processes of Keras on {TITLES[backend]}, a batch each, that merge nothing)",
        arguments=("--apart", "--local-batch"),
        works=("servers64",),
    )


def _one_replica(backend: str) -> Tool:
    return Tool(
        f"one-replica-{backend}",
        f"Phalanx, one replica on {TITLES[backend]}, all cores",
        Kind.SINGLE,
        Share.ALL,
        "benchmarks.one_replica",
        backend=backend,
        paired_with=f"no-phalanx-{backend}",
    )


def servers(backend: str, *options: str, works: tuple[str, ...] = APART, count: int = 1, workers: int = 2) -> Tool:
    """Phalanx with parameter servers; asynchronous unless set otherwise by `options` (of `benchmarks.fit`)."""
    return Tool(
        f"servers-{backend}",
        f"Phalanx with {count} server(s), Keras fit on {TITLES[backend]}",
        Kind.PHALANX,
        Share.OWN,
        "benchmarks.fit",
        ("--strategy", "ParameterServerStrategy", *options),
        backend=backend,
        works=works,
        servers=count,
        workers=workers,
    )


def _mirrored(backend: str) -> Tool:
    """Counterpart of parameter servers: equal shares of every step, with the same number of samples per worker."""
    return replace(
        _phalanx(backend),
        name=f"mirrored-{backend}",
        title=f"Phalanx mirrored, Keras fit on {TITLES[backend]}",
        arguments=("--strategy", "MultiWorkerMirroredStrategy", "--local-batch"),
        works=APART,
    )


_TF_SERVERS = "benchmarks.peers.tf_parameter_server"
# The coordinator and the server, in addition to the two workers.
_TF_SERVER_TASKS = PROCESSES + 2

_TF_DISTRIBUTE = "benchmarks.peers.tf_multiworker"

TOOLS = {
    tool.name: tool
    for tool in (
        *(_phalanx(backend) for backend in TITLES),
        *(_deterministic(backend) for backend in TITLES),
        *(_horovod(backend) for backend in TITLES),
        Tool("hvd-torch", "Phalanx's Horovod, plain PyTorch", Kind.PHALANX, Share.OWN, "benchmarks.horovod_torch"),
        Tool("ddp", "PyTorch DDP, gloo", Kind.PEER, Share.OWN, "benchmarks.peers.ddp"),
        Tool(
            "keras-ddp",
            "Keras on PyTorch in DDP, gloo",
            Kind.PEER,
            Share.OWN,
            "benchmarks.peers.keras_torch_ddp",
        ),
        Tool("tf-distribute", "tf.distribute, RING, tf_keras fit", Kind.PEER, Share.OWN, _TF_DISTRIBUTE),
        Tool(
            "tf-distribute-20",
            "tf.distribute, steps_per_execution=20",
            Kind.PEER,
            Share.OWN,
            _TF_DISTRIBUTE,
            ("--steps-per-execution", "20"),
        ),
        # Bound to one core per process, this tool is more than twice as slow at batch 64: XLA's threads wait for
        # each other on the one core, a whole scheduler tick at a time.
        Tool(
            "keras-dataparallel",
            "Keras DataParallel on JAX, XLA's gloo",
            Kind.PEER,
            Share.ALL,
            "benchmarks.peers.keras_jax_dataparallel",
        ),
        *(_keras(backend, share) for share in (Share.ALL, Share.ONE) for backend in TITLES),
        *(_apart(backend) for backend in TITLES),
        *(_one_replica(backend) for backend in TITLES),
        *(servers(backend) for backend in TITLES),
        *(_mirrored(backend) for backend in TITLES),
        *(_apart_among_servers(backend) for backend in TITLES),
        Tool(
            "tf-servers",
            "tf.distribute with a server, tf_keras fit",
            Kind.PEER,
            Share.ALL,
            _TF_SERVERS,
            works=("servers64",),
            workers=_TF_SERVER_TASKS,
        ),
        Tool(
            "tf-coordinator",
            "tf.distribute with a server, coordinator, 20 steps a call",
            Kind.PEER,
            Share.ALL,
            _TF_SERVERS,
            ("--steps-per-call", "20"),
            works=("servers64",),
            workers=_TF_SERVER_TASKS,
        ),
        Tool(
            "communicators",
            "all-reduce of Phalanx and gloo",
            Kind.COLLECTIVE,
            Share.ALL,
            "benchmarks.all_reduce",
            ("--json", RESULT_FILE),
            works=(ALL_REDUCE,),
        ),
        Tool(
            "mpich",
            "all-reduce of MPICH",
            Kind.COLLECTIVE,
            Share.ALL,
            "benchmarks.peers.mpich_all_reduce",
            works=(ALL_REDUCE,),
            launched_by=("mpiexec", "-n", str(PROCESSES)),
        ),
    )
}


@dataclass(frozen=True)
class SpeedBar:
    """`tool` must reach at least `factor` times the samples/s of `against` in the same round.

    For all-reduce, `work` is a size in bytes, and the ratio is that of calls per second.
    """

    work: str
    tool: str
    against: str
    factor: float
    note: str = ""


@dataclass(frozen=True)
class StartBar:
    """At most `seconds` from the start of the job to the end of its first training step."""

    work: str
    tool: str
    seconds: float


def _speed(tool: str, against: str, factors: dict[str, float], note: str = "") -> list[SpeedBar]:
    return [SpeedBar(work, tool, against, factor, note) for work, factor in factors.items()]


# Horovod 0.28 needs Keras 2 and a separate build. It was timed once, along with DDP, with MPICH (ms per step).
HOROVOD_MS = {"mlp64": 3.8, "mlp512": 6.9, "cnn64": 19.1}
DDP_BESIDE_HOROVOD_MS = {"mlp64": 3.5, "mlp512": 7.3, "cnn64": 16.1}
_NOT_SLOWER_THAN_HOROVOD = {work: round(DDP_BESIDE_HOROVOD_MS[work] / HOROVOD_MS[work], 2) for work in HOROVOD_MS}


def _beside_tf_servers(tool: str) -> list[SpeedBar]:
    return [*_speed(tool, "tf-servers", {"servers64": 4}), *_speed(tool, "tf-coordinator", {"servers64": 1})]


# At most 3 % above the time without Phalanx, and at most 25 % above the time of one process with all cores.
ONE_REPLICA_FACTOR = 1 / 1.03
CNN_FACTOR = 1 / 1.25

SPEED_BARS: Sequence[SpeedBar] = (
    *_speed("phalanx-jax", "ddp", {"mlp64": 3.5, "mlp512": 2.3}),
    *_speed("phalanx-jax", "tf-distribute", {"mlp64": 14, "mlp512": 5}),
    *_speed("phalanx-jax", "keras-dataparallel", {"mlp64": 7, "mlp512": 3.7}),
    *_speed("phalanx-jax", "keras-jax-one-core", {"mlp512": 1.85}, "two workers against one"),
    *_speed("phalanx-tensorflow", "tf-distribute", {"mlp64": 4.5, "mlp512": 3.3, "cnn64": 1.8}),
    *_speed("phalanx-tensorflow", "ddp", _NOT_SLOWER_THAN_HOROVOD, "Horovod's time, through DDP's"),
    *_speed("phalanx-tensorflow", "keras-tensorflow", {"cnn64": CNN_FACTOR}, "at most 25 % above"),
    *_speed("hvd-torch", "ddp", {"mlp64": 1.3}),
    *_speed("hvd-keras-tensorflow", "tf-distribute", {"mlp64": 2}),
    *_speed("phalanx-torch", "keras-ddp", dict.fromkeys(TOGETHER, 1.0)),
    *(
        bar
        for backend in TITLES
        for bar in _speed(
            f"one-replica-{backend}",
            f"no-phalanx-{backend}",
            dict.fromkeys(TOGETHER, ONE_REPLICA_FACTOR),
            "at most 3 % above",
        )
    ),
    *_speed("servers-jax", "tf-servers", {"servers64": 15}),
    *_speed("servers-jax", "tf-coordinator", {"servers64": 4}),
    *(bar for backend in ("tensorflow", "torch") for bar in _beside_tf_servers(f"servers-{backend}")),
)

# Systems of `benchmarks.all_reduce`; a separate script times MPICH.
GLOO, MPICH, SHARED_MEMORY, RING = "gloo", "MPICH", "shared memory", "ring"
ALL_REDUCE_SYSTEMS = (SHARED_MEMORY, RING, GLOO, MPICH)
ALL_REDUCE_BARS: Sequence[SpeedBar] = (
    *_speed(SHARED_MEMORY, GLOO, {"4096": 10, "65536": 10, "1080000": 10, "16000000": 3, "100000000": 2}),
    *_speed(SHARED_MEMORY, MPICH, dict.fromkeys(("1080000", "16000000", "100000000"), 1.0)),
    *_speed(RING, GLOO, dict.fromkeys(("4096", "65536", "1080000", "16000000", "100000000"), 1.0)),
)

START_BARS: Sequence[StartBar] = (StartBar("mlp64", "phalanx-jax", 3.0), StartBar("servers64", "servers-jax", 5.0))
