"""The environment is read once; what is wrong in it is named, with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config.job_config import JobConfig
from phalanx.errors import ConfigurationError


def test_an_empty_environment_gives_the_defaults() -> None:
    config = JobConfig.from_environment({})
    assert config == JobConfig()
    assert config.rendezvous_timeout_s == 300
    assert config.timeout_s == 600


def test_every_variable_is_read(tmp_path: Path) -> None:
    files = {}
    for name in ("CERT", "KEY", "CA"):
        (tmp_path / name).touch()
        files[f"PHALANX_TLS_{name}"] = str(tmp_path / name)
    config = JobConfig.from_environment(
        {
            "PHALANX_SECRET": "0123456789abcdef",
            "PHALANX_JOB_ID": "job",
            "PHALANX_RENDEZVOUS_TIMEOUT": "1.5",
            "PHALANX_TIMEOUT": "2",
            "PHALANX_HOST_ID": "host",
            "PHALANX_LISTEN_FD": "5",
            "PHALANX_SEED": "0",
            **files,
        }
    )
    assert (config.secret, config.job_id, config.host_id) == (b"0123456789abcdef", "job", "host")
    assert (config.rendezvous_timeout_s, config.timeout_s) == (1.5, 2)
    assert (config.listen_fd, config.seed) == (5, 0)
    assert config.tls is not None
    assert config.tls.authority == tmp_path / "CA"


STEP = {"SLURM_STEP_NODELIST": "a,b", "SLURM_PROCID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "job_id"),
    [
        ({**STEP, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, "7"),
        ({**STEP, "SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7"}, "7"),
        ({**STEP, "SLURM_JOB_ID": "7", "PHALANX_JOB_ID": "mine"}, "mine"),
        ({**STEP, "SLURM_JOB_ID": "7", "TF_CONFIG": "{}"}, ""),  # which may name tasks of several jobs
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, ""),  # a batch script, which may start the others through ssh
        ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-a-1@1", "SLURM_JOB_ID": "7"}, "prterun-a-1@1"),
        ({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "55"}, "55"),
        ({**OPEN_MPI, "SLURM_JOB_ID": "7"}, ""),  # which only the first host may have
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PBS_JOBID": "9.host"}, "9.host"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PBS_JOBID": "9.host", "PHALANX_HOSTS": "a,b"}, ""),
    ],
)
def test_a_scheduler_that_starts_all_tasks_names_the_job(environment: dict[str, str], job_id: str) -> None:
    config = JobConfig.from_environment(environment)
    assert (config.job_id, config.has_explicit_job_id) == (job_id, "PHALANX_JOB_ID" in environment)


def test_the_secret_is_not_printed() -> None:
    assert "0123456789abcdef" not in repr(JobConfig(secret=b"0123456789abcdef"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PHALANX_SECRET": ""}, "PHALANX_SECRET has 0 characters.*token_hex"),
        ({"PHALANX_SECRET": "short"}, "PHALANX_SECRET has 5 characters"),
        ({"PHALANX_TIMEOUT": "ten"}, "PHALANX_TIMEOUT='ten' is not a number of seconds greater than 0. Write"),
        ({"PHALANX_TIMEOUT": "0"}, "PHALANX_TIMEOUT='0'"),
        ({"PHALANX_TIMEOUT": "nan"}, "PHALANX_TIMEOUT='nan'"),
        ({"PHALANX_RENDEZVOUS_TIMEOUT": "inf"}, "PHALANX_RENDEZVOUS_TIMEOUT='inf'"),
        ({"PHALANX_SEED": "-1"}, "PHALANX_SEED='-1' is not a whole number"),
        ({"PHALANX_LISTEN_FD": "x"}, "PHALANX_LISTEN_FD='x'"),
        (
            {"PHALANX_TLS_KEY": "key.pem"},
            "PHALANX_TLS_KEY is set, but not PHALANX_TLS_CERT and PHALANX_TLS_CA",
        ),
        (
            {"PHALANX_TLS_KEY": "no", "PHALANX_TLS_CERT": "no", "PHALANX_TLS_CA": "no"},
            "PHALANX_TLS_CERT='no' is not a file",
        ),
    ],
)
def test_a_bad_value_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        JobConfig.from_environment(environment)
