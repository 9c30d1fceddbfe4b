"""The wheel in a container that has Python and nothing else."""

from __future__ import annotations

from conftest import EXAMPLES
from containers import ROOT, docker, download, need_engine, need_image


def test_the_wheel_trains_in_a_bare_container(tmp_path):
    need_engine()
    image = need_image("python:3.11-slim-bookworm")
    wheels = tmp_path / "wheels"
    download(wheels, "numpy")
    mounts = [f"{wheels}:/wheels:ro", f"{ROOT / 'dist'}:/dist:ro", f"{EXAMPLES.parent}:/examples:ro"]
    program = (
        "python -m pip install --quiet --no-index --find-links /wheels /dist/steadfast-*.whl"
        " && steadfast local /examples/python/own_loop.toml --data-dir /tmp/data --output json"
    )
    options = [option for mount in mounts for option in ("--volume", mount)]
    run = docker("run", "--rm", "--network", "none", *options, image, "sh", "-ec", program)
    assert '"state":"finished"' in run.stdout, run.stdout
