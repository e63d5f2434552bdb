"""The hosts of a TPU slice, from the variables of a Kubernetes pod or the metadata server of a virtual machine.

Source of the names and their meaning: JAX's cluster detection (`jax._src.clusters.cloud_tpu_cluster`), which reads the
same values as libtpu.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.cluster.resolvers.base_resolver import ClusterResolver, port_base, read_integer
from phalanx.cluster.spec import WORKER, ClusterSpec, Task
from phalanx.compat.unsupported_names import missing_member
from phalanx.devices.tpu_count import count_tpus
from phalanx.errors import ConfigurationError, UnsupportedError

WORKER_ID, HOSTNAMES, ADDRESSES = "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"
SLICES = "MEGASCALE_NUM_SLICES"
SKIP_METADATA, METADATA_ADDRESS = "TPU_SKIP_MDS_QUERY", "GCE_METADATA_IP"
METADATA_HOST = "metadata.google.internal"
METADATA_TIMEOUT_S = 5.0
"""Time limit for one request. The server is on the same machine, but elsewhere the name look-up may fail slowly."""
_READER = "TPUClusterResolver"
_LOCAL = (None, "", "local")


class TPUClusterResolver(ClusterResolver):
    """One worker per host of a TPU slice (`tf.distribute.cluster_resolver.TPUClusterResolver`).

    Start the program on every host of the slice: `gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...`, or a
    Job on Kubernetes. The hosts come from TPU_WORKER_ID with TPU_WORKER_HOSTNAMES or TPU_PROCESS_ADDRESSES, or else
    from the metadata server of the machine. All workers listen on the same port, 8888 or PHALANX_PORT_BASE. Without any
    of these, the cluster is empty: this process alone.

    Args:
        tpu: None, "" or "local" for the TPU of this host. A program cannot use the TPU of another host.
        job_name: The type of the tasks; must be "worker".
        port: Port of every host, instead of PHALANX_PORT_BASE.
        environ: The variables to read; the process's environment if not given.
        options: Other arguments of the original, which name a TPU in Google Cloud; must be omitted or None.

    Raises:
        ConfigurationError: `tpu` or `options` name a TPU elsewhere.
    """

    _environment = "google"

    def __init__(
        self,
        tpu: str | None = None,
        *,
        job_name: str = WORKER,
        port: int | None = None,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ):
        super().__init__(rpc_layer="grpc", environ=environ)
        named = {name: value for name, value in options.items() if value not in (None, "default")}
        if tpu not in _LOCAL or named or job_name != WORKER:
            given = ", ".join(f"{name}={value!r}" for name, value in {"tpu": tpu, **named}.items())
            raise ConfigurationError(
                f"TPUClusterResolver({given}): a program uses the TPU of the host on which it runs. Start it on the "
                f"hosts of the TPU and write TPUClusterResolver(), or tpu='local'."
            )
        self._port = port
        self._discovered: tuple[int, list[str]] | None = None

    @staticmethod
    def connect(tpu: str | None = None, zone: str | None = None, project: str | None = None) -> TPUClusterResolver:
        """Return the resolver, as the original `connect` does. `TPUStrategy` connects."""
        return TPUClusterResolver(tpu, zone=zone, project=project)

    if not TYPE_CHECKING:  # type checkers see only the declared attributes

        def __getattr__(self, name: str) -> Any:
            raise missing_member("TPUClusterResolver", self, name)

    def cluster_spec(self) -> ClusterSpec:
        index, hosts = self._discover()
        if not hosts:
            return ClusterSpec({})
        if index >= len(hosts):
            raise ConfigurationError(
                f"{_READER}: this is host {index} of the slice, which has {len(hosts)}: {', '.join(hosts)}. Look at "
                f"{WORKER_ID} and {HOSTNAMES}."
            )
        port = port_base(self._variables, self._port)
        if len(hosts) == 1:
            return ClusterSpec({WORKER: [f"127.0.0.1:{port}"]})
        return ClusterSpec({WORKER: [f"{host}:{port}" for host in hosts]})

    def _find_task(self) -> Task | None:
        index, hosts = self._discover()
        return Task(WORKER, index) if hosts else None

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of TPU chips of this host, {"TPU": 4}; {} if it has none. The arguments have no effect."""
        del task_type, task_id, config_proto
        count = count_tpus()
        return {"TPU": count} if count else {}

    def _discover(self) -> tuple[int, list[str]]:
        """Return this host's number in the slice, and all hosts; no hosts without a TPU. Queried once."""
        if self._discovered is None:
            self._discovered = self._from_variables() or self._from_metadata() or (0, [])
        return self._discovered

    def _from_variables(self) -> tuple[int, list[str]] | None:
        listed = self._variables.get(ADDRESSES) or self._variables.get(HOSTNAMES)
        if not listed:
            return None
        _refuse_slices(self._variables.get(SLICES))
        hosts = [_without_port(entry) for entry in listed.split(",") if entry.strip()]
        return (read_integer(self._variables, WORKER_ID, reader=_READER) if len(hosts) > 1 else 0), hosts

    def _from_metadata(self) -> tuple[int, list[str]] | None:
        if self._variables.get(SKIP_METADATA) or not (METADATA_ADDRESS in self._variables or count_tpus()):
            return None
        server = self._variables.get(METADATA_ADDRESS) or METADATA_HOST
        number, endpoints = (_attribute(server, key) for key in ("agent-worker-number", "worker-network-endpoints"))
        if number is None or endpoints is None:
            return None
        _refuse_slices(_slices_in(_attribute(server, "tpu-env") or ""))
        # Each entry is a host, or in an older format `name:id:ip`.
        hosts = [entry.strip().split(":")[-1] for entry in endpoints.split(",")]
        return read_integer({WORKER_ID: number.strip()}, WORKER_ID, reader=_READER), hosts


def _without_port(entry: str) -> str:
    host, colon, port = entry.strip().rpartition(":")
    return host if colon and port.isdecimal() else entry.strip()


def _refuse_slices(count: str | None) -> None:
    if count and count.strip("' ") not in ("", "0", "1"):
        raise UnsupportedError(
            f"{_READER}: this host belongs to a job of {count} slices, and knows the hosts of its own slice only. "
            f"Describe all hosts in TF_CONFIG, or pass a SimpleClusterResolver with their ClusterSpec."
        )


def _slices_in(tpu_env: str) -> str | None:
    """Return the number of slices, from lines such as `MEGASCALE_NUM_SLICES: '2'`."""
    lines = dict(line.split(":", 1) for line in tpu_env.splitlines() if ":" in line)
    return next((value.strip() for name, value in lines.items() if name.strip() == SLICES), None)


def _attribute(server: str, key: str) -> str | None:
    """Return an attribute of this machine from its metadata server; None if the server or attribute does not exist."""
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
    try:
        with opener.open(request, timeout=METADATA_TIMEOUT_S) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, TimeoutError, OSError, http.client.HTTPException):
        return None
