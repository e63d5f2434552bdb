"""Each scheduler's environment gives the cluster that its processes are in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster import (
    ClusterResolver,
    ClusterSpec,
    KubernetesClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    Task,
    TFConfigClusterResolver,
    resolve,
)
from phalanx.cluster.resolvers.host_list import (
    expand_counts,
    expand_host_list,
    interleave_hosts,
    parse_hosts,
    worker_cluster,
)
from phalanx.cluster_resolver import GCEClusterResolver, UnionResolver
from phalanx.devices.gpu_count import count_gpus
from phalanx.errors import ConfigurationError, RendezvousError

SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "PHALANX_NUM_WORKERS": "3",
    "PHALANX_SERVICE": "train",
}
TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})}


# --------------------------------------------------------------------------- lists of hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("a[01-03,7]", ["a01", "a02", "a03", "a7"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("a[098-101],b", ["a098", "a099", "a100", "a101", "b"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("gpu-a[1],cpu-b", ["gpu-a1", "cpu-b"]),
    ],
)
def test_node_lists_are_expanded_in_their_order(text: str, hosts: list[str]) -> None:
    assert expand_host_list(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1", "a1]", "a[[1]]", "a[]", "a[3-1]", "a[x]", "a[1-999999999]", "a[1-2-3]"])
def test_malformed_node_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        expand_host_list(text)


def test_counts_are_expanded() -> None:
    assert expand_counts("3(x2),2,1") == [3, 3, 2, 1]
    for text in ("", "x", "2(x)", "2(3)", "9(x999999)"):
        with pytest.raises(ConfigurationError):
            expand_counts(text)


def test_hosts_with_slots_are_read() -> None:
    assert parse_hosts("a:2, b", where="hosts") == [("a", 2), ("b", 1)]
    for text in ("", "a:0", "a:x", ":2", "a,,b"):
        with pytest.raises(ConfigurationError, match="hosts is"):
            parse_hosts(text, where="hosts")


def test_ports_count_up_on_each_host() -> None:
    assert worker_cluster([("a", 2), ("b", 1), ("a", 1)], 10) == {"worker": ["a:10", "a:11", "b:10", "a:12"]}
    assert interleave_hosts([("a", 2), ("b", 1)]) == [("a", 1), ("b", 1), ("a", 1)]


# ----------------------------------------------------------------------------------- Slurm


def test_slurm_processes_are_workers_host_by_host() -> None:
    resolver = SlurmClusterResolver(environ=SLURM)
    assert resolver.cluster_spec() == {"worker": ["n01:8888", "n01:8889", "n02:8888", "n02:8889"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.get_task_info() == ("worker", 2)


def test_slurm_cyclic_numbering_is_followed() -> None:
    environ = {**SLURM, "SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": "1"}
    assert SlurmClusterResolver(environ=environ).cluster_spec() == {
        "worker": ["n01:8888", "n02:8888", "n01:8889", "n02:8889"]
    }


def test_slurm_jobs_divide_the_processes() -> None:
    jobs = {"chief": 1, "worker": 2, "evaluator": 1}
    resolver = SlurmClusterResolver(jobs=jobs, port_base=9000, environ=SLURM)
    assert resolver.cluster_spec() == {
        "chief": ["n01:9000"],
        "worker": ["n01:9001", "n02:9000"],
        "evaluator": ["n02:9001"],
    }
    assert resolver.get_task_info() == ("worker", 1)


def test_slurm_tasks_per_node_can_be_given() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a,b"}
    expected = {"worker": ["a:8888", "b:8888"]}
    assert SlurmClusterResolver(tasks_per_node=1, environ=environ).cluster_spec() == expected
    assert SlurmClusterResolver(tasks_per_node={"a": 1, "b": 1}, environ=environ).cluster_spec() == expected


def test_slurm_tasks_per_node_by_host_are_in_slurms_order() -> None:
    environ = {"SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "a,b"}
    resolver = SlurmClusterResolver(tasks_per_node={"b": 1, "a": 2}, environ=environ)
    assert resolver.cluster_spec() == {"worker": ["a:8888", "a:8889", "b:8888"]}
    assert resolver.get_task_info() == ("worker", 2)
    other_network = {"b-ib": 1, "a-ib": 2}
    resolver = SlurmClusterResolver(tasks_per_node=other_network, environ={**environ, "SLURM_NODEID": "0"})
    with pytest.raises(ConfigurationError, match="process 2 on b-ib, where a-ib was expected"):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_NODELIST": None}, "needs SLURM_STEP_NODELIST.*srun python train.py"),
        ({"SLURM_PROCID": None}, "needs SLURM_PROCID"),
        ({"SLURM_PROCID": "9", "SLURM_NODEID": None}, "SLURM_PROCID=9, but the job step has only 4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "names 2 hosts.*but tasks for 1"),
        ({"SLURM_DISTRIBUTION": "plane=2"}, "srun --distribution=block"),
        ({"SLURM_PROCID": "1", "SLURM_NODEID": "1"}, "started process 1 on n02, where n01 was expected"),
        ({"PHALANX_PORT_BASE": "x"}, "PHALANX_PORT_BASE='x'"),
        ({"PHALANX_PORT_BASE": "70000"}, "the first port is 70000"),
    ],
)
def test_a_slurm_environment_that_does_not_fit_is_refused(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**SLURM, **changes}.items() if value is not None}
    resolver = SlurmClusterResolver(environ=environ)
    with pytest.raises(ConfigurationError, match=message):
        print(resolver.cluster_spec(), resolver.task_id)


def test_slurm_jobs_must_fit_the_processes() -> None:
    with pytest.raises(ConfigurationError, match="names 3 tasks, but the job step has 4 processes"):
        SlurmClusterResolver(jobs={"worker": 3}, environ=SLURM).cluster_spec()


# ------------------------------------------------------------------------------------- MPI


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_mpi_on_one_host_needs_nothing_more(environ: dict[str, str]) -> None:
    resolver = MPIClusterResolver(environ={**environ, "PHALANX_PORT_BASE": "7000"})
    assert resolver.cluster_spec() == {"worker": ["127.0.0.1:7000", "127.0.0.1:7001"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def mpi(rank: int, size: int, local_rank: int, **more: str) -> MPIClusterResolver:
    environ = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        **more,
    }
    return MPIClusterResolver(environ=environ)


def test_mpi_hosts_come_from_our_variable_or_the_scheduler(tmp_path: Path) -> None:
    expected = ClusterSpec({"worker": ["a:8888", "a:8889", "b:8888", "b:8889"]})
    assert mpi(2, 4, 0, PHALANX_HOSTS="a:2,b:2").cluster_spec() == expected
    assert mpi(2, 4, 0, SLURM_JOB_NODELIST="a,b", SLURM_TASKS_PER_NODE="2(x2)").cluster_spec() == expected
    node_file = tmp_path / "nodes"
    node_file.write_text("a\na\nb\nb\n")
    assert mpi(2, 4, 0, PBS_NODEFILE=str(node_file)).cluster_spec() == expected
    # More places than processes: the first are taken.
    assert mpi(2, 3, 0, PHALANX_HOSTS="a:2,b:2").cluster_spec().num_tasks("worker") == 3


@pytest.mark.parametrize(
    ("resolver", "message"),
    [
        (mpi(2, 4, 0), "without naming their hosts.*PHALANX_HOSTS=host0:2,host1:2"),
        (mpi(2, 4, 0, PHALANX_HOSTS="a:1,b:1"), "PHALANX_HOSTS names 2 places .a:1,b:1., but .* 4 processes"),
        (mpi(1, 4, 0, PHALANX_HOSTS="a:2,b:2"), "rank 1 should be number 1 on a .*number 0 on"),
        (mpi(4, 4, 0, PHALANX_HOSTS="a:4"), "is not below"),
        (mpi(0, 4, 0, PBS_NODEFILE="/nowhere/nodes"), "PBS_NODEFILE='/nowhere/nodes' cannot be read"),
        (MPIClusterResolver(environ={}), "not started by mpirun or mpiexec"),
        (MPIClusterResolver(environ={"PMI_RANK": "x", "PMI_SIZE": "2"}), "PMI_.*, which is not a whole number"),
    ],
)
def test_an_mpi_environment_that_does_not_do_is_refused(resolver: MPIClusterResolver, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolver.cluster_spec()


# ------------------------------------------------------------------------------ Kubernetes


@pytest.mark.parametrize("changes", [{}, {"JOB_COMPLETION_INDEX": None}], ids=["indexed Job", "StatefulSet"])
def test_kubernetes_pods_are_workers_by_index(changes: dict[str, str | None]) -> None:
    environ = {name: value for name, value in {**KUBERNETES, **changes}.items() if value is not None}
    resolver = KubernetesClusterResolver(environ=environ, hostname="mnist-1.train.default.svc")
    assert resolver.cluster_spec() == {"worker": [f"mnist-{pod}.train:8888" for pod in range(3)]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


@pytest.mark.parametrize(
    ("changes", "hostname", "message"),
    [
        ({"PHALANX_NUM_WORKERS": None}, "mnist-1", "Set PHALANX_NUM_WORKERS in the pod template"),
        ({"PHALANX_NUM_WORKERS": "0"}, "mnist-1", "PHALANX_NUM_WORKERS is 0"),
        ({"PHALANX_NUM_WORKERS": "1"}, "mnist-1", "index 1, but the job has 1 workers"),
        ({"PHALANX_SERVICE": None}, "mnist-1", "headless"),
        ({"JOB_COMPLETION_INDEX": None}, "mnist", "'mnist', which does not end in an index"),
        ({"JOB_COMPLETION_INDEX": "x"}, "mnist-1", "JOB_COMPLETION_INDEX='x'"),
    ],
)
def test_a_pod_that_was_told_too_little_is_refused(changes: dict[str, str | None], hostname: str, message: str) -> None:
    environ = {name: value for name, value in {**KUBERNETES, **changes}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=message):
        KubernetesClusterResolver(environ=environ, hostname=hostname).cluster_spec()


class FakePods:
    """The part of `kubernetes.client.CoreV1Api` that lists pods."""

    def __init__(self, pods: dict[str, list[tuple[str, str, str]]]) -> None:
        self._pods = pods

    def list_pod_for_all_namespaces(self, label_selector: str) -> Any:
        return SimpleNamespace(
            items=[
                SimpleNamespace(
                    metadata=SimpleNamespace(name=name),
                    status=SimpleNamespace(pod_ip=ip, host_ip="10.0.0.1", phase=phase),
                )
                for name, ip, phase in self._pods.get(label_selector, [])
            ]
        )


PODS = {
    "job-name=a": [("a-1", "10.1.0.2", "Running"), ("a-0", "10.1.0.1", "Running")],
    "job-name=b": [("b-0", "10.1.0.3", "Running")],
    "job-name=ps": [("ps-0", "10.1.0.4", "Running")],
    "job-name=tensorflow": [("t-0", "10.1.0.5", "Running")],
    "job-name=late": [("late-0", "", "Pending")],
}


def test_kubernetes_lists_the_pods_with_certain_labels() -> None:
    labels = {"worker": ["job-name=a", "job-name=b"], "ps": ["job-name=ps"]}
    resolver = KubernetesClusterResolver(labels, 2222, override_client=FakePods(PODS), hostname="b-0.train")
    assert resolver.cluster_spec() == {
        "worker": ["10.1.0.1:2222", "10.1.0.2:2222", "10.1.0.3:2222"],
        "ps": ["10.1.0.4:2222"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master("ps", 0, "grpc") == "grpc://10.1.0.4:2222"
    resolver.task_type, resolver.task_id = "worker", 0  # as programs for tf.distribute say it
    assert str(resolver.task()) == "worker/0"
    elsewhere = KubernetesClusterResolver(labels, override_client=FakePods(PODS), hostname="laptop")
    assert elsewhere.task() is None
    assert KubernetesClusterResolver(override_client=FakePods(PODS)).cluster_spec() == {"worker": ["10.1.0.5:8470"]}


def test_kubernetes_lists_pods_with_ipv6_addresses() -> None:
    pods = FakePods({"job-name=a": [("a-0", "fd00:10::5", "Running"), ("a-1", "fd00:10::6", "Running")]})
    resolver = KubernetesClusterResolver({"worker": ["job-name=a"]}, 2222, override_client=pods, hostname="a-1")
    assert resolver.cluster_spec() == {"worker": ["[fd00:10::5]:2222", "[fd00:10::6]:2222"]}
    assert str(resolver.task()) == "worker/1"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"worker": ["job-name=late"]}, "'late-0' .* is not running; its phase is 'Pending'"),
        ({"worker": ["job-name=none"]}, "no pod with the label 'job-name=none'"),
        ({"worker": "job-name=a"}, r"write a list of label selectors, \['job-name=a'\]"),
    ],
)
def test_pods_that_are_not_there_yet_are_named(labels: Any, message: str) -> None:
    with pytest.raises((ConfigurationError, RendezvousError), match=message):
        KubernetesClusterResolver(labels, override_client=FakePods(PODS)).cluster_spec()


def test_without_the_client_of_kubernetes_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigurationError, match="pip install kubernetes"):
        KubernetesClusterResolver({"worker": ["job-name=a"]})


# ------------------------------------------------------------------------ Google Compute Engine


class FakeComputeEngine:
    """The part of the API of Compute Engine that lists instances, two on a page."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses = addresses
        self.requests: list[Any] = []

    def instanceGroups(self) -> FakeComputeEngine:
        return self

    def instances(self) -> FakeComputeEngine:
        return self

    def listInstances(self, **request: Any) -> Any:
        self.requests.append(request)
        return self._page(0)

    def listInstances_next(self, previous_request: Any, previous_response: Any) -> Any:
        start = previous_request.start + 2
        return self._page(start) if start < len(self._addresses) else None

    def _page(self, start: int) -> Any:
        names = list(self._addresses)[start : start + 2]
        items = (
            {"items": [{"instance": f"https://compute/zones/z/instances/{name}"} for name in names]} if names else {}
        )
        return SimpleNamespace(start=start, execute=lambda: items)

    def get(self, project: str, zone: str, instance: str) -> Any:
        details = {"networkInterfaces": [{"networkIP": self._addresses[instance]}]}
        return SimpleNamespace(execute=lambda: details)


def test_instances_of_a_group_are_tasks_in_the_order_of_their_addresses() -> None:
    service = FakeComputeEngine({"c": "10.0.0.3", "a": "10.0.0.1", "b": "10.0.0.2"})
    resolver = GCEClusterResolver("project", "z", "group", 8470, task_id=1, service=service)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.3:8470"]}
    (request,) = service.requests
    assert (request["instanceGroup"], request["body"]) == ("group", {"instanceState": "RUNNING"})
    assert str(resolver.task()) == "worker/1"
    assert (resolver.master(), resolver.master("worker", 2)) == ("grpc://10.0.0.2:8470", "grpc://10.0.0.3:8470")
    resolver.task_id = 2
    assert str(resolver.task()) == "worker/2"
    with pytest.raises(ConfigurationError, match="cannot change"):
        resolver.task_type = "ps"


def test_an_empty_group_and_a_missing_package_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RendezvousError, match="No instance of the group 'group'"):
        GCEClusterResolver("project", "z", "group", 8470, service=FakeComputeEngine({})).cluster_spec()
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    with pytest.raises(ConfigurationError, match="pip install google-api-python-client"):
        GCEClusterResolver("project", "z", "group", 8470)


# --------------------------------------------------------------------------- simple, resolve


def test_the_simple_resolver_answers_what_it_was_given() -> None:
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": ["a:1", "b:1"]}), task_type="worker", task_id=1, num_accelerators={"GPU": 8}
    )
    assert resolver.cluster_spec() == {"worker": ["a:1", "b:1"]}
    assert resolver.num_accelerators() == {"GPU": 8}
    assert resolver.master("worker", 0, "grpc") == "grpc://a:1"
    assert (resolver.master(), resolver.environment) == ("", "")
    half = SimpleClusterResolver({"worker": ["a:1"]}, task_type="worker")
    with pytest.raises(ConfigurationError, match="Give both"):
        half.task()


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({}, SimpleClusterResolver),
        (TF_CONFIG, TFConfigClusterResolver),
        ({**TF_CONFIG, **SLURM, **OPEN_MPI}, TFConfigClusterResolver),
        (SLURM, SlurmClusterResolver),
        ({**SLURM, **OPEN_MPI}, MPIClusterResolver),
        ({**SLURM, **MPICH}, SlurmClusterResolver),
        (MPICH, MPIClusterResolver),
        (KUBERNETES, KubernetesClusterResolver),
        ({"KUBERNETES_SERVICE_HOST": "x"}, SimpleClusterResolver),
        ({"SLURM_JOB_NODELIST": "a"}, SimpleClusterResolver),  # salloc's shell is no step
    ],
)
def test_resolve_picks_by_what_is_there(environ: dict[str, str], kind: type[ClusterResolver]) -> None:
    assert type(resolve(environ)) is kind


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a"}
HOROVODRUN = {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN, r"torchrun \(WORLD_SIZE=2, RANK=1, .*phalanx run --workers 2 "),
        (HOROVODRUN, "horovodrun .*phalanx run --workers 4 "),
    ],
)
def test_launchers_that_leave_each_process_alone_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(environ)
    assert type(resolve({**environ, **TF_CONFIG})) is TFConfigClusterResolver
    assert type(resolve({**environ, **OPEN_MPI})) is MPIClusterResolver  # horovodrun with mpirun
    one = {**environ, "WORLD_SIZE": "1", "HOROVOD_SIZE": "1"}
    assert type(resolve(one)) is SimpleClusterResolver


def test_gpus_are_counted_without_a_backend(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, tmp_path) == 1


def test_a_union_has_the_tasks_of_all() -> None:
    first = SimpleClusterResolver(
        {"worker": ["a:1"], "ps": {1: "p:1"}}, task_type="worker", task_id=0, rpc_layer="grpc"
    )
    second = SimpleClusterResolver({"worker": ["b:1"], "ps": {1: "p:1", 2: "q:1"}})
    union = UnionResolver(first, second)
    assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1"], "ps": {1: "p:1", 2: "q:1"}}
    assert (union.task(), union.rpc_layer) == (Task("worker", 0), "grpc")
    union.task_id = 1
    assert union.master() == "grpc://b:1"
    assert UnionResolver(first, second, task_type="ps", task_id=2).task() == Task("ps", 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"ps": {1: "q:1"}}, "ps/1 is at p:1 according to one resolver, and at q:1"),
        ({"ps": ["p:1"]}, "one resolver gives a list"),
    ],
)
def test_resolvers_that_contradict_each_other(other: dict[str, Any], message: str) -> None:
    one = SimpleClusterResolver({"ps": {1: "p:1", 3: "s:1"}})
    with pytest.raises(ConfigurationError, match=message):
        UnionResolver(one, SimpleClusterResolver(other)).cluster_spec()


def test_a_union_of_nothing() -> None:
    with pytest.raises(ConfigurationError, match="got nothing"):
        UnionResolver()
