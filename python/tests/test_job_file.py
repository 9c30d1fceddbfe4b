"""The code of a job beside its job file, for trainers that `steadfast local` has not started."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys

import pytest
import steadfast
from steadfast import trainer

COMMAND = [sys.executable, "-m", "steadfast.trainer"]


def job_file(directory, model: str):
    path = directory / "job.toml"
    path.write_text(f'name = "x"\n[model]\nkind = "python"\n{model}\n')
    return path


def test_the_script_beside_the_job_file_is_run(tmp_path):
    path = job_file(tmp_path, 'script = "program.py"')
    (tmp_path / "program.py").write_text("import beside, sys\nprint(beside.NAME, sys.argv[1:])\n")
    (tmp_path / "beside.py").write_text("NAME = 'found'\n")
    environment = {**os.environ, "STEADFAST_JOB_FILE": str(path)}
    run = subprocess.run([*COMMAND, "--more"], env=environment, capture_output=True, text=True)
    assert run.stdout == "found ['--more']\n", run.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_a_script_that_has_no_trainer_yet(tmp_path, number):
    path = job_file(tmp_path, 'script = "program.py"')
    # The script only has to stay alive: `signal.pause` would miss a signal that arrives just before it.
    wait = "print('ready', flush=True)\nwhile True: time.sleep(0.1)\n"
    (tmp_path / "program.py").write_text("import time\n" + wait)
    environment = {**os.environ, "STEADFAST_JOB_FILE": str(path)}
    with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        process.send_signal(number)
        try:
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


def test_modules_beside_the_job_file_are_found_first(tmp_path, monkeypatch):
    path = job_file(tmp_path, 'entry = "model_beside:build"')
    (tmp_path / "model_beside.py").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert trainer._beside_job_file(str(path)) is None
    assert importlib.import_module("model_beside").__file__ == str(tmp_path / "model_beside.py")


@pytest.mark.parametrize("model", ['script = "missing.py"', "not TOML"])
def test_an_unusable_job_file_is_an_error_of_the_user(tmp_path, monkeypatch, model):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(steadfast.InvalidError):
        trainer._beside_job_file(str(job_file(tmp_path, model)))
