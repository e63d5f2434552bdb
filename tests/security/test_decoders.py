"""No bytes lead a decoder astray: it returns values, or raises its error, and takes little memory for either."""

from __future__ import annotations

import itertools
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from phalanx.config.environment_variables import JOBS_DIRECTORY
from phalanx.errors import ConfigurationError, FrameError
from phalanx.launcher.watching import job_registry
from phalanx.launcher.watching.job_connection import ControlRequest
from phalanx.launcher.watching.job_follower import read_view
from phalanx.monitoring.job_events import EVENTS_FILE
from phalanx.runtime import crash_report
from phalanx.runtime.write_claim import WriteClaim
from phalanx.transport.decoding import Decoder
from phalanx.transport.serialization import decode, encode
from tests.security import fuzz

ARRAY, TUPLE = "\0array", "\0tuple"


def forged(*array: Any) -> bytes:
    return msgspec.msgpack.encode({ARRAY: list(array)})


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(forged("O", [1], b"\x41" * 8), id="addresses of objects"),
        pytest.param(forged("O", [2], b"\x41" * 8), id="too few of them"),
        pytest.param(forged("O,f4", [1], b"\x41" * 12), id="an object among numbers"),
        pytest.param(forged("(1000000000,)f4", [1], b"1234"), id="an array in an array"),
        pytest.param(forged("f4", [1 << 40], b"1234"), id="too short"),
        pytest.param(forged("f4", [-1, -1], b"1234"), id="negative lengths"),
        pytest.param(forged("f4", [0, 1 << 62, 1 << 62], b""), id="overflow"),
        pytest.param(forged("S0", [1 << 40], b""), id="elements without bytes"),
        pytest.param(forged("f4", [1] * 65, b"1234"), id="too many axes"),
        pytest.param(forged("f4", "1", b"1234"), id="a text as shape"),
        pytest.param(forged("f4", [1], "1234"), id="text as content"),
        pytest.param(forged("f4"), id="nothing but a type"),
        pytest.param(forged("i4," * 100_000, [1], b"1234"), id="a long type"),
        pytest.param(forged(5, [1], b"1234"), id="a number as type"),
        pytest.param(forged(",,", [1], b"1234"), id="a type that NumPy cannot parse"),
        pytest.param(forged("O", [3], [1, 2]), id="too few objects"),
        pytest.param(msgspec.msgpack.encode({ARRAY: 1}), id="no array"),
        pytest.param(msgspec.msgpack.encode({TUPLE: 1}), id="no tuple"),
        pytest.param(b"\x91" * 100_000 + b"\xc0", id="deeply nested"),
        pytest.param(b"\xa2\xff\xfe", id="text that is not UTF-8"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="four billion items"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_forged_values_are_refused(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode(content)
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([ARRAY, TUPLE, "a"]), inner, max_size=3)
        | st.tuples(st.text(max_size=5), st.lists(st.integers(-2, 5), max_size=3), st.binary(max_size=40)).map(
            lambda array: {ARRAY: list(array)}
        )
    ),
    max_leaves=20,
)


@given(VALUES.map(msgspec.msgpack.encode) | st.binary())
def test_any_bytes_are_a_value_or_an_error(content: bytes) -> None:
    try:
        value = decode(content)
    except FrameError:
        return
    repr(value)


@given(st.sampled_from(["f4", "<i8", "U3", "bool"]), st.lists(st.integers(0, 3), max_size=3))
def test_what_is_encoded_is_decoded(dtype: str, shape: list[int]) -> None:
    array = np.zeros(shape, dtype)
    np.testing.assert_array_equal(decode(encode(array)), array, strict=True)


def test_every_decoder_withstands_mutations_of_what_it_reads() -> None:
    """For longer: `python -m tests.security.fuzz`."""
    for name, target in fuzz.targets().items():
        check = fuzz.Checked(name, target)
        for content in itertools.islice(fuzz.mutations(target.seeds, random.Random(name)), 100):
            check(content)


NOT_UTF_8 = b"{%s}\n" % b", ".join(b'"%s": "\xff"' % each for each in (b"job", b"run", b"kind", b"action", b"type"))
TOO_DEEP = b"[" * 100_000 + b"\n"


@pytest.mark.parametrize("content", [NOT_UTF_8, TOO_DEEP], ids=["text that is not UTF-8", "deeply nested"])
def test_bytes_that_are_no_message_are_refused_where_they_are_read(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`msgspec` raises errors of other families for these than for other damage."""
    monkeypatch.setenv(JOBS_DIRECTORY, str(tmp_path))
    (tmp_path / "other.json").write_bytes(content)
    assert job_registry.running() == []
    (tmp_path / EVENTS_FILE).write_bytes(content)
    with pytest.raises(ConfigurationError, match="was not written by this version"):
        read_view(tmp_path)
    (tmp_path / ".fit.owner").write_bytes(content)
    assert WriteClaim(tmp_path, "fit")._read() is None
    assert crash_report.parse(content) is None
    for form in (msgspec.json, msgspec.msgpack):
        with pytest.raises(FrameError, match="cannot be read"):
            Decoder(ControlRequest, json=form is msgspec.json).decode(content)


@pytest.mark.timeout(60)
def test_what_is_no_file_is_no_checkpoint(tmp_path: Path) -> None:
    """To open a pipe waits for another process."""
    os.mkfifo(tmp_path / "fit0-000000005.weights.h5")
    (tmp_path / "fit0-000000006.weights.h5").mkdir()
    (tmp_path / "fit0-000000007.weights.h5").symlink_to("/dev/zero")
    assert CheckpointDirectory(tmp_path, basename="fit0").newest() is None
