"""Docker, and packages for Python in a container."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def docker(*args: object, check: bool = True) -> "subprocess.CompletedProcess[str]":
    command = ["docker", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not check or done.returncode == 0, f"{command}: {done.stderr}"
    return done


def need_engine() -> None:
    """Skips the test if there is no Docker engine."""
    try:
        if docker("info", check=False).returncode != 0:
            pytest.skip("the Docker engine does not answer")
    except FileNotFoundError:
        pytest.skip("docker is not installed")


def need_image(*names: str) -> str:
    """Returns the first of these images that is available; skips the test if none is."""
    for name in names:
        if docker("image", "inspect", name, check=False).returncode == 0:
            return name
    for name in names:
        if docker("pull", "--quiet", name, check=False).returncode == 0:
            return name
    pytest.skip(f"the image {' or '.join(names)} is not available locally and cannot be pulled")


def download(directory: pathlib.Path, *packages: str) -> None:
    """Downloads packages for Python 3.11, the version of Debian 12."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
    target = ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
    older = ["--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64"]
    subprocess.run([*pip, *target, *older, "--dest", directory, *packages], check=True)
