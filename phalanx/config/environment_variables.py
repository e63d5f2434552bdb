"""The environment variables that Phalanx reads and sets, with their defaults and meanings.

Each constant is a name. `VARIABLES` is the table of all of them; the documentation is checked against it. Variables
of a scheduler (`SLURM_...`, `OMPI_...`) appear only in its resolver.
"""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_RENDEZVOUS_TIMEOUT_S = 300.0
"""5 minutes. Schedulers start the tasks of a job minutes apart, and the user is still present to see it fail."""
DEFAULT_TIMEOUT_S = 600.0
"""10 minutes. The slowest legitimate delay between two steps is the compilation of a large model or a checkpoint to a
slow file system. A dead process is detected at once, without this wait."""
DEFAULT_RETURN_TIMEOUT_S = 60.0
"""Time for a scheduler to restart a killed task."""
DEFAULT_STALL_WARNING_S = 60.0
"""Compiling a large model takes a minute too, but then the warning is informative."""
DEFAULT_GRACE_S = 4.0
"""The survivors of a failed worker detect its loss at once, and need a moment to raise and print PeerLostError."""
DEFAULT_EVALUATOR_GRACE_S = 600.0
"""One evaluation of the last checkpoint. The same limit as for anything else in a job (PHALANX_TIMEOUT)."""
DEFAULT_PREEMPTION_GRACE_S = 30.0
"""The time that Kubernetes and spot machines of cloud providers grant before they shut down."""
DEFAULT_DISCOVERY_INTERVAL_S = 2.0
"""Horovod runs its script every second, but hosts take more than two seconds to start."""
DEFAULT_DISCOVERY_TIMEOUT_S = 30.0
"""A discovery script queries a scheduler or a cloud, which may be slow. A slower script hangs."""
DEFAULT_PORT_BASE = 8888
"""As in TensorFlow's SlurmClusterResolver."""
DEFAULT_FUSION_BYTES = 64 * 2**20
"""Half of Horovod 0.28's value. Large enough to make the startup cost of a collective negligible."""
DEFAULT_CYCLE_MS = 1.0
DEFAULT_CACHE_CAPACITY = 1024
DEFAULT_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -T"
"""Never prompts, and detects a dead host after three missed replies."""


class Variable(NamedTuple):
    """One row of the table; `default` is the meaning of an unset or empty variable, as text."""

    name: str
    meaning: str
    default: str


VARIABLES: dict[str, Variable] = {}


def _variable(name: str, meaning: str, default: object = "none") -> str:
    text = f"{default:g}" if isinstance(default, float) else str(default)
    VARIABLES[name] = Variable(name, meaning, text)
    return name


# The job and its tasks.
SECRET = _variable(
    "PHALANX_SECRET", "known to all tasks of the job, at least 16 characters; `phalanx run` creates one for each job"
)
JOB_ID = _variable(
    "PHALANX_JOB_ID",
    "names the job: tasks of different jobs reject each other even if they share a secret",
    "the scheduler's job number, if the cluster comes from a scheduler",
)
RENDEZVOUS_TIMEOUT = _variable(
    "PHALANX_RENDEZVOUS_TIMEOUT", "seconds to wait for the other tasks at startup", DEFAULT_RENDEZVOUS_TIMEOUT_S
)
TIMEOUT = _variable(
    "PHALANX_TIMEOUT",
    "seconds that a collective waits for a rank that is connected but does not arrive",
    DEFAULT_TIMEOUT_S,
)
RETURN_TIMEOUT = _variable(
    "PHALANX_RETURN_TIMEOUT",
    "seconds to wait for a killed parameter server to return, and on servers for the chief; 120 under `phalanx run`",
    DEFAULT_RETURN_TIMEOUT_S,
)
TLS_CERT = _variable(
    "PHALANX_TLS_CERT", "PEM file: the certificate of this task and its intermediates; set all three or none"
)
TLS_KEY = _variable("PHALANX_TLS_KEY", "PEM file: the key of this task's certificate")
TLS_CA = _variable("PHALANX_TLS_CA", "PEM file: the authority that signed the certificates of all tasks")
ENCRYPTION = _variable(
    "PHALANX_ENCRYPTION",
    "which connections of collectives and parameter servers are encrypted, in a job with a secret and without TLS: "
    "`always`, `remote` (those between hosts) or `never`; all other connections always are",
    "always",
)
TLS_FILES = (TLS_CERT, TLS_KEY, TLS_CA)
SEED = _variable(
    "PHALANX_SEED", "a number that must be equal on all tasks; to seed Keras, call `keras.utils.set_random_seed`"
)
PREEMPTION_SIGNAL = _variable(
    "PHALANX_PREEMPTION_SIGNAL", "a signal that, like SIGTERM, makes `fit` save a checkpoint and exit"
)
ACCELERATIONS = _variable(
    "PHALANX_ACCELERATIONS",
    "which faster implementations of parts of a step are used: `all`, `none`, their names, or names with a minus to "
    "disable them",
    "all",
)
SIMULATED_MBITS = _variable(
    "PHALANX_SIMULATED_MBITS",
    "for experiments: a task sends at most this many megabits per second in collectives, and tasks of one host do "
    "not share memory; the same for all tasks",
)

# The cluster, where a scheduler does not describe all of it.
TF_CONFIG = _variable("TF_CONFIG", "the cluster and this task as JSON, in TensorFlow's format")
PORT_BASE = _variable("PHALANX_PORT_BASE", "first port on each host, if the scheduler assigns none", DEFAULT_PORT_BASE)
HOSTS = _variable("PHALANX_HOSTS", "the hosts of an MPI job, as `a:2,b:2`")
NUM_WORKERS = _variable("PHALANX_NUM_WORKERS", "Kubernetes: number of workers")
SERVICE = _variable("PHALANX_SERVICE", "Kubernetes: name of the headless service of the pods")
TASK_REPLICAS = _variable(
    "PHALANX_TASK_REPLICAS",
    "how many replicas a task of MultiWorkerMirroredStrategy makes that `phalanx run` has not started",
    "one for each GPU, if no other task of the cluster is on its host",
)
HOST_ID = _variable("PHALANX_HOST_ID", "for tests: replaces this host's identity, so that one host looks like several")

# Set by the launcher for its workers.
LISTEN_FD = _variable("PHALANX_LISTEN_FD", "descriptor of the listening socket that the launcher opened for this task")
RUN = _variable(
    "PHALANX_RUN", "id of this `phalanx run` and how often it has started the job before, separated by a colon"
)
ELASTIC_COORDINATOR = _variable("PHALANX_ELASTIC_COORDINATOR", "`host:port` of the launcher of an elastic job")
SNAPSHOTS = _variable("PHALANX_SNAPSHOTS", "two files for a parameter server's snapshots, separated by a colon")
WORKER_BOOTSTRAP = _variable("PHALANX_WORKER_BOOTSTRAP", "what a worker of this launcher needs before the program runs")
PROGRESS_FILE = _variable("PHALANX_PROGRESS_FILE", "memory shared with the launcher for progress reports")
LOCAL_REPLICAS = _variable("PHALANX_LOCAL_REPLICAS", "number of local replicas of MirroredStrategy")
REPLICA_CLUSTER = _variable(
    "PHALANX_REPLICA_CLUSTER", "all replicas of a job whose tasks have several devices, in the format of TF_CONFIG"
)
DEVICES_PER_WORKER = _variable(
    "PHALANX_DEVICES_PER_WORKER", "the devices of each worker, in a job whose program spans the devices of all workers"
)
PLAN = _variable("PHALANX_PLAN", "what `phalanx plan` asks of the program that it runs")
HOST_GPUS = _variable("PHALANX_HOST_GPUS", "CUDA_VISIBLE_DEVICES before the launcher restricted each worker to one GPU")

# As set by `horovodrun`, for programs that read them. Unset in elastic jobs, whose ranks change, and with servers.
HOROVOD_RANK = _variable("HOROVOD_RANK", "the rank of this process")
HOROVOD_SIZE = _variable("HOROVOD_SIZE", "the number of processes")
HOROVOD_LOCAL_RANK = _variable("HOROVOD_LOCAL_RANK", "the rank of this process among those of its host")
HOROVOD_LOCAL_SIZE = _variable("HOROVOD_LOCAL_SIZE", "the number of processes on this host")
HOROVOD_CROSS_RANK = _variable("HOROVOD_CROSS_RANK", "this host's place among those that have such a local rank")
HOROVOD_CROSS_SIZE = _variable("HOROVOD_CROSS_SIZE", "the number of hosts that have such a local rank")

# Read by the launcher.
GRACE = _variable("PHALANX_GRACE", "seconds that the survivors of a failed worker have to exit", DEFAULT_GRACE_S)
EVALUATOR_GRACE = _variable(
    "PHALANX_EVALUATOR_GRACE", "seconds that an evaluator has after training", DEFAULT_EVALUATOR_GRACE_S
)
PREEMPTION_GRACE = _variable(
    "PHALANX_PREEMPTION_GRACE",
    "seconds that a job has for its checkpoint when it is told to stop",
    DEFAULT_PREEMPTION_GRACE_S,
)
DISCOVERY_INTERVAL = _variable(
    "PHALANX_DISCOVERY_SECONDS", "seconds between two runs of a host discovery script", DEFAULT_DISCOVERY_INTERVAL_S
)
DISCOVERY_TIMEOUT = _variable(
    "PHALANX_DISCOVERY_TIMEOUT", "seconds that one run of a host discovery script may take", DEFAULT_DISCOVERY_TIMEOUT_S
)
JOBS_DIRECTORY = _variable(
    "PHALANX_JOBS", "where `phalanx status` and the dashboard look for running jobs", "~/.cache/phalanx/jobs"
)
DASHBOARD_TOKEN = _variable(
    "PHALANX_DASHBOARD_TOKEN", "the token of a dashboard's link, for Prometheus; without it, a new one each time"
)
SSH = _variable("PHALANX_SSH", "the ssh command with its options", DEFAULT_SSH)
REMOTE_PYTHON = _variable("PHALANX_REMOTE_PYTHON", "the Python interpreter on other hosts", "this one's path")

# Horovod's own names.
TIMELINE = _variable("PHALANX_TIMELINE", "file on the host of rank 0 for the timeline of all ranks")
HOROVOD_TIMELINE = _variable(
    "HOROVOD_TIMELINE", "same as PHALANX_TIMELINE; DYNAMIC (the program starts the timeline) has no effect"
)
MARK_CYCLES = _variable("HOROVOD_TIMELINE_MARK_CYCLES", "1: the timeline shows negotiation rounds too", 0)
STALL_CHECK_TIME = _variable(
    "HOROVOD_STALL_CHECK_TIME_SECONDS", "seconds until a warning names the missing ranks", DEFAULT_STALL_WARNING_S
)
STALL_SHUTDOWN_TIME = _variable(
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "seconds until the job ends; 0: as PHALANX_TIMEOUT (in Horovod: never)",
    0,
)
STALL_CHECK_DISABLE = _variable(
    "HOROVOD_STALL_CHECK_DISABLE", "1: disable the warning; the job still ends after the second limit", 0
)
AUTOTUNE = _variable(
    "HOROVOD_AUTOTUNE", "1: find the fastest collectives during the first steps; the same for all tasks", 0
)
AUTOTUNE_LOG = _variable("HOROVOD_AUTOTUNE_LOG", "file in which rank 0 logs the trials and the choice")
FUSION_THRESHOLD = _variable(
    "HOROVOD_FUSION_THRESHOLD",
    "bytes up to which tensors that are ready together are reduced as one; 0: no fusion",
    DEFAULT_FUSION_BYTES,
)
CYCLE_TIME = _variable(
    "HOROVOD_CYCLE_TIME", "milliseconds between two negotiation rounds while ranks wait", DEFAULT_CYCLE_MS
)
CACHE_CAPACITY = _variable(
    "HOROVOD_CACHE_CAPACITY", "how many named operations are cached for cheap repetition", DEFAULT_CACHE_CAPACITY
)

# Variables of Keras, CUDA and the backends.
KERAS_BACKEND = _variable(
    "KERAS_BACKEND",
    "the backend of Keras",
    "keras.json, else tensorflow; if not installed, workers use one that is",
)
VISIBLE_GPUS = _variable("CUDA_VISIBLE_DEVICES", "the GPUs that this process may use", "all")
CPU_DEVICES = _variable("JAX_NUM_CPU_DEVICES", "into how many devices JAX divides the CPU of this process", 1)
JAX_THREADS = _variable("PJRT_NPROC", "how many threads JAX computes with on a CPU", "one for each core")
