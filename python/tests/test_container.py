"""The wheel in a container that has Python and nothing else."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from conftest import EXAMPLES

ROOT = pathlib.Path(__file__).parents[2]
IMAGE = "python:3.11-slim-bookworm"


def docker(*args: object, check: bool = True) -> "subprocess.CompletedProcess[str]":
    command = ["docker", *map(str, args)]
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def image() -> str:
    try:
        if docker("info", check=False).returncode != 0:
            pytest.skip("the Docker engine does not answer")
    except FileNotFoundError:
        pytest.skip("docker is not installed")
    if docker("image", "inspect", IMAGE, check=False).returncode != 0:
        if docker("pull", "--quiet", IMAGE, check=False).returncode != 0:
            pytest.skip(f"the image {IMAGE} is not available locally and cannot be pulled")
    return IMAGE


def test_the_wheel_trains_in_a_bare_container(image, tmp_path):
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
    target = ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
    older = ["--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64"]
    subprocess.run([*pip, *target, *older, "--dest", wheels, "numpy"], check=True)
    mounts = [f"{wheels}:/wheels:ro", f"{ROOT / 'dist'}:/dist:ro", f"{EXAMPLES.parent}:/examples:ro"]
    program = (
        "python -m pip install --quiet --no-index --find-links /wheels /dist/steadfast-*.whl"
        " && steadfast local /examples/python/own_loop.toml --data-dir /tmp/data --output json"
    )
    options = [option for mount in mounts for option in ("--volume", mount)]
    run = docker("run", "--rm", "--network", "none", *options, image, "sh", "-ec", program, check=False)
    assert run.returncode == 0, run.stderr
    assert '"state":"finished"' in run.stdout, run.stdout
