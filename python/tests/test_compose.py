"""The deployment of ``deploy/compose.python.yaml``, with a test server as store."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
from typing import Any, Callable, Dict, List

import numpy
import pytest
import steadfast
from conftest import EXAMPLES
from containers import ROOT, docker, download, need_engine, need_image

FILES = ["deploy/compose.yaml", "deploy/compose.python.yaml", "tests/compose.store.yaml"]
ETCD_IMAGES = ("quay.io/coreos/etcd:v3.6.14", "quay.io/coreos/etcd:v3.5.16")
IMAGE = "steadfast-python:test"
WHEELS_IMAGE = "steadfast-wheels:test"

STOP_MAX = 20
"""Longest time in seconds that trainers may take to leave after SIGTERM."""

JOB_MAX = 300
"""Timeout of the job in seconds."""


class Deployment:
    """A running job; as a context manager it is removed at the end."""

    def __init__(self, jobs: pathlib.Path, job: str) -> None:
        self._options = ["--project-name", f"steadfast-test-{os.getpid()}"]
        self._options += [option for file in FILES for option in ("--file", str(ROOT / file))]
        self._environment = {
            **os.environ,
            # It has all programs.
            "STEADFAST_IMAGE": IMAGE,
            "STEADFAST_PYTHON_IMAGE": IMAGE,
            "ETCD_IMAGE": need_image(*ETCD_IMAGES),
            "JOBS": str(jobs),
            "JOB": job,
        }

    def compose(self, *args: str, check: bool = True) -> str:
        command = ["docker", "compose", *self._options, *args]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout

    def status(self) -> Dict[str, Any]:
        """Returns the status of the job; empty if it cannot be read at the moment."""
        tool = ["run", "--rm", "--no-deps", "-T", "admin", "steadfast", "status", "--json"]
        status: Dict[str, Any] = json.loads(self.compose(*tool, check=False) or "{}")
        return status

    def has_trained(self, version: int) -> bool:
        return version <= self.status().get("version", -1)

    def trainers(self, form: str) -> List[str]:
        """Returns a property of each trainer's container, in the format of ``docker inspect``."""
        found = self.compose("ps", "--quiet", "--all", "trainer").split()
        return docker("inspect", "--format", form, *found).stdout.split()

    def __enter__(self) -> "Deployment":
        try:
            self.compose("up", "--wait", "--no-build", "--quiet-pull")
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            print(self.compose("logs", "--no-color", "--tail", "15", check=False))
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "1", check=False)


@pytest.fixture
def _image(tmp_path):
    """Builds the target ``python`` of the Dockerfile with the wheel in ``dist``."""
    need_engine()
    if docker("compose", "version", check=False).returncode != 0:
        pytest.skip("docker has no `compose` command")
    need_image("debian:bookworm-slim")
    need_image("motoserver/moto:5.1.0")
    context = tmp_path / "context"
    # The same version as here: it decides about the bits.
    download(context, f"numpy=={numpy.__version__}")
    for wheel in (ROOT / "dist").glob("steadfast-*.whl"):
        shutil.copy(wheel, context)
    (context / "Dockerfile").write_text("FROM scratch\nCOPY *.whl /wheels/\n")
    docker("build", "--quiet", "--tag", WHEELS_IMAGE, context)
    given = ["--build-arg", f"WHEELS={WHEELS_IMAGE}", "--build-arg", "REQUIREMENTS="]
    dockerfile = ["--file", ROOT / "deploy/Dockerfile", "--target", "python"]
    docker("build", "--quiet", "--tag", IMAGE, *given, *dockerfile, ROOT)


def test_a_killed_container_of_a_trainer_changes_no_bit(_image, tmp_path):
    jobs = copy_job(tmp_path / "jobs", pause="time.sleep(0.005)")
    with Deployment(jobs, "own-loop") as deployment:
        until("the job trains", lambda: deployment.has_trained(100))
        began = time.monotonic()
        deployment.compose("stop", "trainer")
        assert time.monotonic() - began < STOP_MAX
        assert deployment.trainers("{{.State.ExitCode}}") == ["0", "0"]
        before = deployment.status()["version"]
        deployment.compose("up", "--detach", "--no-recreate", "--no-build", "trainer")
        until("the job trains again", lambda: deployment.has_trained(before + 50))
        # From the host: Docker does not restart a container after `docker kill`.
        os.kill(int(deployment.trainers("{{.State.Pid}}")[0]), signal.SIGKILL)
        until("the job is over", lambda: deployment.trainers("{{.State.Status}}") == ["exited"] * 2)
        assert deployment.trainers("{{.State.ExitCode}}") == ["0", "0"]
        assert sorted(deployment.trainers("{{.RestartCount}}")) == ["0", "1"]
        result = deployment.status()["result"]
    assert result["state"] == "finished", result
    job = steadfast.Job.from_file(copy_job(tmp_path / "undisturbed") / "own-loop.toml")
    with steadfast.local(job, data_dir=tmp_path / "local", progress=False) as run:
        expected = run.wait(timeout=JOB_MAX)
    assert result["parameters_sha256"] == expected["parameters_sha256"]


def copy_job(directory: pathlib.Path, pause: str = "") -> pathlib.Path:
    """Copies a job with its code and data; ``pause`` is executed for each gradient."""
    directory.mkdir()
    shutil.copy(EXAMPLES.parent / "data/digits.parquet", directory)
    code = (EXAMPLES / "own_loop.py").read_text()
    code = f"import time\n{code}".replace("work.push(", f"{pause}; work.push(") if pause else code
    (directory / "own_loop.py").write_text(code)
    job = (EXAMPLES / "own_loop.toml").read_text()
    job = job.replace("passes = 20", "passes = 150").replace("../data/", "")
    (directory / "own-loop.toml").write_text(job)
    return directory


def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + JOB_MAX
    while not holds():
        assert time.monotonic() < deadline, what
