"""The package itself: installation, notebook, documentation, forks."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import venv

import pytest
import steadfast
from conftest import EXAMPLES

ROOT = pathlib.Path(__file__).parents[2]


def test_the_wheel_alone_gives_the_package_and_the_programs(tmp_path):
    venv.create(tmp_path, with_pip=True)
    (wheel,) = (ROOT / "dist").glob("steadfast-*.whl")
    pip = [tmp_path / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, wheel], check=True)
    for program in ("steadfast", "steadfast-master", "steadfast-pserver", "steadfast-trainer"):
        subprocess.run([tmp_path / "bin" / program, "--version"], check=True, stdout=subprocess.PIPE)
    # Outside the repository, without PyTorch.
    program = "import steadfast; help(steadfast.Trainer); help(steadfast.Job)"
    python = tmp_path / "bin" / "python"
    shown = subprocess.run([python, "-c", program], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert "for work in trainer" in shown.stdout
    job = EXAMPLES / "own_loop.toml"
    command = [tmp_path / "bin" / "steadfast", "local", job, "--data-dir", tmp_path / "data"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=120)


def test_the_package_says_its_version():
    assert steadfast.__version__ == importlib.metadata.version("steadfast")


def test_the_elastic_program_of_the_page_passes_strict_type_checks(tmp_path):
    pytest.importorskip("mypy")
    page = (ROOT / "docs" / "elastic.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (program,) = [it for it in programs if "TorchState(" in it and "@elastic.run" in it]
    (tmp_path / "program.py").write_text(program)
    shown = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stdout


def test_a_notebook_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    # Modules and data are found as in examples/python; what is written goes elsewhere.
    (tmp_path / "python").mkdir()
    (tmp_path / "data").symlink_to(EXAMPLES.parent / "data")
    (tmp_path / "python" / "digits.py").symlink_to(EXAMPLES / "digits.py")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path / "python")}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "".join(str(output) for output in outputs)
    assert "accuracy" in shown
    assert "loaded 0.weight, 0.bias, 3.weight, 3.bias" in shown


def run_script(tmp_path, code: str) -> str:
    """Runs a program as the only trainer of a short job; returns its log."""
    program = tmp_path / "program.py"
    program.write_text(ZERO + code)
    job = steadfast.Job(
        name="script",
        passes=1,
        dataset=dict(
            source=EXAMPLES.parent / "data" / "digits.parquet",
            format="parquet",
            features=["pixel_*"],
            label="digit",
        ),
        model=dict(kind="python", script=program),
    )
    run = steadfast.local(job, data_dir=tmp_path / "data", trainers=1, progress=False)
    with run:
        run.wait(120)
    return (tmp_path / "data" / "logs" / "trainer-0.log").read_text()


ZERO = """
import logging, os, sys
import steadfast

class Zero(steadfast.Model):
    def parameters(self):
        return {"weight": (1,)}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        return 0.0, {}

    def evaluate(self, parameters, batch):
        return 0.0, 0.0
"""


def test_a_forked_child_is_told_what_to_do(tmp_path):
    log = run_script(tmp_path, FORKS)
    assert "ForkedError" in log and "spawn" in log, log


FORKS = """
with steadfast.Trainer(model=Zero()) as trainer:
    for number, work in enumerate(trainer):
        if number == 0:
            child = os.fork()
            if child == 0:
                try:
                    work.push({}, loss_sum=0.0)
                except steadfast.ForkedError as error:
                    print("ForkedError:", error, flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        work.push({}, loss_sum=0.0)
"""


def test_one_process_may_run_a_trainer_after_another_and_logs_to_logging(tmp_path):
    log = run_script(tmp_path, TWO)
    assert "PY INFO steadfast.trainer" in log, log
    assert "the first has left" in log and "the second is done" in log, log


TWO = """
logging.basicConfig(level=logging.INFO, format="PY %(levelname)s %(name)s %(message)s")
with steadfast.Trainer(model=Zero()) as trainer:
    for work in trainer:
        work.push({}, loss_sum=0.0)
        break
logging.info("the first has left")
with steadfast.Trainer(model=Zero()) as trainer:
    for work in trainer:
        work.push({}, loss_sum=0.0)
logging.info("the second is done")
"""


def test_a_trainer_that_is_dropped_in_its_loop_leaves_the_job(tmp_path):
    log = run_script(tmp_path, DROPPED)
    assert "the second is done" in log, log


DROPPED = """
def first():
    for work in steadfast.Trainer(model=Zero()):
        return

first()
with steadfast.Trainer(model=Zero()) as trainer:
    for work in trainer:
        work.push({}, loss_sum=0.0)
print("the second is done")
"""


def test_a_log_is_as_that_of_other_processes_without_handlers(tmp_path):
    log = run_script(
        tmp_path,
        "with steadfast.Trainer(model=Zero()) as trainer:\n    for work in trainer:\n        work.push({}, loss_sum=0.0)\n",
    )
    assert " info  trainer script " in log, log


def test_the_programs_of_the_page_run(tmp_path):
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, re.DOTALL))
    assert page.count("```python") == len(blocks) == 8
    for name, code in blocks.items():
        (tmp_path / f"{name}.py").write_text(code)
    data = EXAMPLES.parent / "data" / "digits.parquet"
    (tmp_path / "digits.parquet").symlink_to(data)
    shown = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "accuracy 0.9" in shown.stdout and "(128, 64)" in shown.stdout, shown.stdout
    shown = subprocess.run(
        [sys.executable, "watch.py"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert "PassEnd(passes=20, " in shown and "evaluated after 20 passes: " in shown and "Checkpoint(id=" in shown, (
        shown
    )
    assert "the best: Evaluation(passes=" in shown, shown
    tables = "import towers; print(sorted(towers.build(None).tables()))"
    shown = subprocess.run([sys.executable, "-c", tables], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert shown.stdout == "['item', 'user']\n"
    counted = (
        "import counted, several, torch; from types import SimpleNamespace; "
        "output, label = torch.zeros(2, 5, 3), torch.tensor([[1, 2, -100], [0, -100, -100]]); "
        "total, count = counted.loss(output, label); "
        "print(round(float(total / count), 4), int(count), several.build(SimpleNamespace(features=4)).further_metrics)"
    )
    shown = subprocess.run([sys.executable, "-c", counted], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("1.6094 3 ") and "recall" in shown.stdout and "margin" in shown.stdout, shown.stdout
    job = steadfast.Job(
        name="loop",
        passes=10,
        dataset=dict(source=data, format="parquet", features=["pixel_*"], label="digit", feature_scale=1 / 16),
        model=dict(kind="python", script=tmp_path / "loop.py"),
        optimizer=dict(kind="adam"),
    )
    with steadfast.local(job, data_dir=tmp_path / "data", progress=False) as run:
        run.wait(180)
