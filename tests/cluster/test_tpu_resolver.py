"""The hosts of a TPU slice, as a Kubernetes pod's variables and a machine's metadata server describe them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cluster.resolvers.tpu import TPUClusterResolver
from phalanx.devices.tpu_count import count_tpus
from phalanx.errors import ConfigurationError, UnsupportedError

PODS = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "t-0.tpu,t-1.tpu,t-2.tpu"}


def test_a_pod_knows_the_hosts_from_its_variables() -> None:
    resolver = TPUClusterResolver(environ=PODS)
    assert resolver.cluster_spec().as_dict() == {"worker": ["t-0.tpu:8888", "t-1.tpu:8888", "t-2.tpu:8888"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master("worker", 1) == "grpc://t-1.tpu:8888"
    addresses = {**PODS, "TPU_PROCESS_ADDRESSES": "10.0.0.1:8471,10.0.0.2:8471,10.0.0.3:8471", "PHALANX_PORT_BASE": "9"}
    assert TPUClusterResolver("local", environ=addresses).cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:9", "10.0.0.2:9", "10.0.0.3:9"]
    }
    alone = TPUClusterResolver("", environ={"TPU_WORKER_HOSTNAMES": "localhost"}, zone=None, project=None)
    assert alone.cluster_spec().as_dict() == {"worker": ["127.0.0.1:8888"]}


def test_a_process_elsewhere_is_alone() -> None:
    resolver = TPUClusterResolver(environ={})
    assert not resolver.cluster_spec()
    assert resolver.task() is None
    assert TPUClusterResolver.connect().master() == ""


@pytest.mark.parametrize(
    ("environ", "kind", "message"),
    [
        ({**PODS, "TPU_WORKER_ID": "3"}, ConfigurationError, "host 3 of the slice, which has 3"),
        ({**PODS, "TPU_WORKER_ID": "x"}, ConfigurationError, "TPU_WORKER_ID='x', which is not a whole number"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ConfigurationError, "needs TPU_WORKER_ID"),
        ({**PODS, "MEGASCALE_NUM_SLICES": "2"}, UnsupportedError, "a job of 2 slices"),
    ],
)
def test_what_describes_no_slice_is_refused(environ: dict[str, str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        TPUClusterResolver(environ=environ).cluster_spec()


@pytest.mark.parametrize(
    "given", [{"tpu": "grpc://10.0.0.2:8470"}, {"zone": "us-central1-b"}, {"job_name": "coordinator"}]
)
def test_a_tpu_of_another_host_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="Start it on the hosts of the TPU"):
        TPUClusterResolver(**given)


class Metadata(http.server.BaseHTTPRequestHandler):
    attributes: dict[str, str]

    def do_GET(self) -> None:
        value = self.attributes.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/"))
        known = value is not None and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a metadata server and its attributes."""
    attributes: dict[str, str] = {}
    handler = type("Handler", (Metadata,), {"attributes": attributes})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", attributes
        server.shutdown()
        thread.join()


def test_a_machine_knows_the_hosts_from_its_metadata(
    metadata: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, attributes = metadata
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    environ = {"GCE_METADATA_IP": address}
    assert not TPUClusterResolver(environ=environ).cluster_spec()
    attributes |= {"agent-worker-number": "1", "worker-network-endpoints": "10.0.0.1,10.0.0.2"}
    resolver = TPUClusterResolver(environ=environ)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8888", "10.0.0.2:8888"]}
    assert resolver.task_id == 1
    attributes["worker-network-endpoints"] = "a:0:10.0.0.7,b:1:10.0.0.8"
    assert TPUClusterResolver(environ=environ).cluster_spec().as_dict()["worker"] == ["10.0.0.7:8888", "10.0.0.8:8888"]
    assert not TPUClusterResolver(environ={**environ, "TPU_SKIP_MDS_QUERY": "1"}).cluster_spec()
    attributes["tpu-env"] = "ACCELERATOR_TYPE: 'v5e-8'\nMEGASCALE_NUM_SLICES: '2'\n"
    with pytest.raises(UnsupportedError, match="slices"):
        TPUClusterResolver(environ=environ).cluster_spec()


def test_chips_are_counted_on_the_bus(tmp_path: Path) -> None:
    for name, vendor, device in (("0", "0x1ae0", "0x0063"), ("1", "0x1ae0", "0x0063"), ("2", "0x10de", "0x2330")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")
    (tmp_path / "3").mkdir()
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "vendor").write_text("0x1ae0\n")
    (tmp_path / "4" / "device").write_text("0x1234\n")  # a network card
    assert count_tpus(tmp_path) == 2
    assert count_tpus(tmp_path / "none") == 0
