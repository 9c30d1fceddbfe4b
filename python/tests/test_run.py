"""Jobs from a Python program."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import steadfast
from conftest import EXAMPLES, kill, until, until_step
from steadfast import _native

DIGITS = dict(
    source="../data/digits.parquet",
    format="parquet",
    features=["pixel_*"],
    label="digit",
    feature_scale=1 / 16,
)


def softmax(name: str, **more) -> steadfast.Job:
    settings = dict(
        passes=30,
        dataset=DIGITS,
        model=dict(kind="softmax", classes=10),
        learning_rate=dict(base=0.2),
        evaluation=dict(fraction=0.2),
        checkpoint=dict(every=datetime.timedelta(seconds=2)),
    )
    return steadfast.Job(name=name, **{**settings, **more})


def test_errors_of_a_job_name_the_argument():
    with pytest.raises(steadfast.BadJobFile) as caught:
        softmax("bad", learning_rate=dict(base=-1, warm_up=3), optimizer=dict(kind="adm"))
    errors = caught.value.errors
    assert any("learning_rate.base" in it for it in errors), errors
    assert any("learning_rate.warm_up" in it and "warmup_steps" in it for it in errors), errors
    assert any("optimizer.kind" in it for it in errors), errors
    assert isinstance(caught.value, steadfast.InvalidError)
    with pytest.raises(steadfast.BadJobFile, match="model.options"):
        softmax("bad", model=dict(kind="softmax", classes=10, options=dict(x=object())))
    with pytest.raises(TypeError):
        softmax("bad", epochs=3)


def test_each_key_and_section_of_a_job_file_is_an_argument():
    page = (EXAMPLES.parents[1] / "docs" / "job-file.md").read_text()
    sections = re.findall(r"^## `\[(\w+)\]`", page, re.MULTILINE)
    assert "tables" in sections and "checkpoint" in sections
    top = page.partition("## Top level")[2].partition("\n## ")[0]
    keys = re.findall(r"^\| `(\w+)` \|", top, re.MULTILINE)
    assert "seed" in keys and "warm_spares" in keys
    arguments = inspect.signature(steadfast.Job).parameters
    assert {"async_" if it == "async" else it for it in keys + sections} <= set(arguments)
    assert "warm_spares = 2" in softmax("followed", warm_spares=2).to_toml()
    job = softmax(
        "tables",
        model=dict(kind="python", entry="clicks:build"),
        tables=dict(user=dict(optimizer=dict(kind="adagrad"))),
    )
    assert "[tables.user" in job.to_toml()
    with pytest.raises(steadfast.BadJobFile, match="`tables.user`.*adagradd"):
        softmax("tables", tables=dict(user=dict(optimizer=dict(kind="adagradd"))))


def test_a_function_of_the_program_itself_is_refused_as_a_model():
    with pytest.raises(steadfast.BadJobFile, match="`model.entry` names `__main__`.*%%writefile"):
        softmax("notebook", model=dict(kind="python", entry="__main__:build"))


def test_a_job_file_and_arguments_describe_the_same_job(monkeypatch):
    read = steadfast.Job.from_file("own_loop.toml")
    assert read.name == "own-loop"
    assert str(EXAMPLES.parent / "data" / "digits.parquet") in read.to_toml()
    assert softmax("same") == softmax("same")
    assert softmax("same") != softmax("same", seed=1)


def test_the_files_that_a_job_starts_from_are_found_from_its_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    start = dict(file="model.safetensors", optimizer="state.safetensors")
    job = softmax("tuned", optimizer=dict(kind="adam"), start=start)
    expected = {key: str(tmp_path / name) for key, name in start.items()}
    assert json.loads(_native.toml_to_json(job.to_toml()))["start"] == expected
    (tmp_path / "tuned").mkdir()
    relative = job.to_toml().replace(str(tmp_path / "model"), "../model").replace(str(tmp_path / "state"), "../state")
    (tmp_path / "tuned" / "job.toml").write_text(relative)
    assert steadfast.Job.from_file("tuned/job.toml") == job


def test_a_run_shows_status_curves_and_model(tmp_path):
    # The job goes on while its status is asked for, also on a busy machine.
    job = softmax("run", passes=500)
    run = steadfast.local(job, data_dir=tmp_path, trainers=1, pservers=1, progress=False)
    with run:
        until(run, lambda: run.status()["job"] == "run")
        summary = run.wait(timeout=120)
    assert summary["state"] == "finished"
    curves = run.curves()
    assert len({len(column) for column in curves.values()}) == 1
    model = run.model("numpy")
    assert model["weight"].shape == (10, 64)
    assert model["weight"].dtype == np.float32
    with pytest.raises(steadfast.NotFoundError):
        run.kill("trainer", 0)
    with pytest.raises(steadfast.InvalidError, match="framework"):
        run.model("caffe")
    # A finished job is not trained again.
    again = steadfast.local(job, data_dir=tmp_path, progress=False)
    assert again.wait(60)["parameters_sha256"] == summary["parameters_sha256"]


def test_steps_of_curves_increase_though_the_job_was_rolled_back(tmp_path):
    job = softmax("curves", passes=10_000, checkpoint=dict(every=datetime.timedelta(minutes=10)))
    run = steadfast.local(job, data_dir=tmp_path, trainers=1, pservers=1, progress=False)

    def versions():
        return [it["version"] for it in run.status().get("points", ())]

    with run:
        # The master adds two points a second: some of them are of steps that are done again.
        until(run, lambda: 6 <= len(set(versions())))
        kill(run, "pserver", 0)
        until(run, lambda: any(after < before for before, after in zip(versions(), versions()[1:])))
        steps = run.curves()["step"]
    assert all(before < after for before, after in zip(steps, steps[1:])), steps


def test_a_job_that_fails_raises_its_reason(tmp_path):
    job = softmax("diverges", model=dict(kind="linear"), learning_rate=dict(base=1e30))
    with pytest.raises(steadfast.JobFailed, match="not finite") as caught:
        steadfast.local(job, data_dir=tmp_path, progress=False).wait(120)
    assert caught.value.summary["state"] == "failed"


def test_an_exception_in_a_model_reaches_the_caller_with_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def build(spec):\n    return undefined_name\n")
    monkeypatch.chdir(tmp_path)
    dataset = {**DIGITS, "source": EXAMPLES.parent / "data" / "digits.parquet"}
    job = softmax("broken", dataset=dataset, model=dict(kind="python", entry="broken:build"))
    with pytest.raises(steadfast.InvalidError) as caught:
        steadfast.local(job, data_dir=tmp_path / "data", progress=False).wait(120)
    first, *rest = str(caught.value).splitlines()
    assert first.endswith("NameError: name 'undefined_name' is not defined"), first
    assert [it for it in rest if "undefined_name" in it] == [
        "      return undefined_name",
        "  NameError: name 'undefined_name' is not defined" + f" (logs: {tmp_path}/data/logs)",
    ], rest
    assert str(caught.value).count("Traceback") == 1 and str(caught.value).count("trainer-") == 1
    # On a terminal as well.
    command = ["steadfast", "local", "job.toml", "--data-dir", "again", "--python", sys.executable]
    (tmp_path / "job.toml").write_text(job.to_toml())
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120).stderr
    assert shown.count("Traceback") == 1 and shown.count("error: ") == 1, shown


def test_an_exception_in_a_loop_reaches_the_caller_with_its_traceback(tmp_path):
    program = tmp_path / "loop.py"
    program.write_text("def start():\n    raise KeyError('my key')\n\nstart()\n")
    job = softmax("loop", model=dict(kind="python", script=program))
    with pytest.raises(steadfast.InvalidError, match="my key") as caught:
        steadfast.local(job, data_dir=tmp_path / "data", progress=False).wait(120)
    assert "in start" in str(caught.value)


def test_an_exception_in_an_evaluation_ends_the_run(tmp_path, monkeypatch):
    program = INFINITE.replace('return float("inf"), float("nan")', "raise KeyError('my evaluation')")
    assert "my evaluation" in program
    (tmp_path / "raises.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    dataset = {**DIGITS, "source": EXAMPLES.parent / "data" / "digits.parquet"}
    model = dict(kind="python", entry="raises:build")
    job = softmax("raises", dataset=dataset, model=model, passes=1_000_000)
    with pytest.raises(steadfast.InvalidError, match="my evaluation"):
        steadfast.local(job, data_dir=tmp_path / "data", progress=False).wait(120)


def test_an_evaluation_that_is_not_finite_leaves_the_job_readable(tmp_path, monkeypatch):
    (tmp_path / "infinite.py").write_text(INFINITE)
    monkeypatch.chdir(tmp_path)
    dataset = {**DIGITS, "source": EXAMPLES.parent / "data" / "digits.parquet"}
    job = softmax("infinite", dataset=dataset, model=dict(kind="python", entry="infinite:build"))
    with steadfast.local(job, data_dir=tmp_path / "data", progress=False) as run:
        summary = run.wait(120)
    assert summary["state"] == "finished"
    assert run.status()["job"] == "infinite"


INFINITE = """
import steadfast

class Infinite(steadfast.Model):
    def parameters(self):
        return {"weight": (3,)}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        return 1.0, {"weight": parameters["weight"]}

    def evaluate(self, parameters, batch):
        return float("inf"), float("nan")

def build(spec):
    return Infinite()
"""


def test_values_of_numpy_and_mappings_are_taken():
    dataset = dict(DIGITS, features=np.array(["pixel_1", "pixel_2"]))
    job = softmax("numpy", dataset=dataset, learning_rate=dict(base=np.float32(0.5)))
    assert 'features = ["pixel_1", "pixel_2"]' in job.to_toml()
    with pytest.raises(steadfast.BadJobFile, match="not finite"):
        softmax("nan", learning_rate=dict(base=float("nan")))


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(steadfast.BadJobFile(["one", "two"])))
    assert error.errors == ["one", "two"]
    assert pickle.loads(pickle.dumps(steadfast.JobFailed("why", {"steps": 3}))).summary == {"steps": 3}


def test_a_stopped_job_is_resumed_by_the_same_call(tmp_path):
    job = softmax("resumed", passes=400)
    with steadfast.local(job, data_dir=tmp_path, progress=False) as run:
        until_step(run, 100)
    assert not run.is_running
    with steadfast.local(job, data_dir=tmp_path, progress=False) as run:
        summary = run.wait(240)
    with steadfast.local(job, data_dir=tmp_path / "other", trainers=1, progress=False) as other:
        assert other.wait(240)["parameters_sha256"] == summary["parameters_sha256"]


def test_a_finished_job_is_extended_and_goes_on_with_the_same_call(tmp_path):
    """I10: the parameters are those of a job that had this length from the beginning."""
    with steadfast.local(softmax("extended", passes=3), data_dir=tmp_path / "parts", progress=False) as run:
        run.wait(timeout=60)
    with pytest.raises(steadfast.InvalidError, match="exactly one of"):
        run.extend()
    with pytest.raises(steadfast.InvalidError, match="extend it with --passes"):
        run.extend(steps=5)
    assert run.extend(passes=4) == 7
    with steadfast.local(softmax("extended", passes=3), data_dir=tmp_path / "parts", progress=False) as run:
        extended = run.wait(timeout=60)
    with steadfast.local(softmax("extended", passes=7), data_dir=tmp_path / "whole", progress=False) as run:
        whole = run.wait(timeout=60)
    assert (extended["passes"], extended["parameters_sha256"]) == (7, whole["parameters_sha256"])


def test_a_stopped_job_goes_on_with_other_settings(tmp_path):
    """I10: steps before a change keep the settings that they were trained with."""
    first = softmax("changed", passes=3)
    with steadfast.local(first, data_dir=tmp_path, progress=False) as run:
        before = run.wait(timeout=60)
    with pytest.raises(steadfast.InvalidError, match="has the settings that it has"):
        run.change(first)
    with pytest.raises(steadfast.InvalidError, match="`seed` differs"):
        run.change(softmax("changed", passes=3, seed=99))
    changed = softmax("changed", passes=3, checkpoint=dict(every_steps=7))
    assert run.change(changed) == before["steps"]
    assert run.extend(passes=2) == 5
    with steadfast.local(changed, data_dir=tmp_path, progress=False) as run:
        assert run.wait(timeout=60)["passes"] == 5


def test_a_rule_of_ones_own_trains_and_its_average_is_returned(tmp_path):
    """S004-48: a rule that is written as text has the results of the built-in one; the average is of many steps."""
    text = "velocity = 0.9*velocity + g; p -= lr*velocity"
    rule = steadfast.Rule(text, states=["velocity"], weight_decay=0.01)
    average = dict(decay=0.9)
    found = {}
    for name, optimizer in (("own", rule), ("built-in", dict(kind="momentum", weight_decay=0.01))):
        job = softmax(name, passes=3, optimizer=optimizer, average=average)
        with steadfast.local(job, data_dir=tmp_path / name, progress=False) as run:
            run.wait(timeout=60)
            found[name] = (run.model("numpy"), run.model("numpy", average=True))
    for own, built_in in zip(*found.values()):
        for key, values in own.items():
            assert np.allclose(values, built_in[key], rtol=1e-5, atol=1e-6), key
    model, averages = found["own"]
    assert model.keys() == averages.keys()
    assert any(not np.array_equal(values, averages[key]) for key, values in model.items())
    with pytest.raises(steadfast.BadJobFile, match="the name `rate` is unknown; known are"):
        softmax("wrong", optimizer=steadfast.Rule("p -= rate*g"))
    with steadfast.local(softmax("plain", passes=1), data_dir=tmp_path / "plain", progress=False) as run:
        run.wait(timeout=60)
        with pytest.raises(steadfast.InvalidError, match="the job has no averages"):
            run.model(average=True)


def test_ctrl_c_stops_the_job_as_in_a_shell(tmp_path):
    job = softmax("interrupted", passes=100_000)
    run = steadfast.local(job, data_dir=tmp_path, progress=False)
    until_step(run, 10)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(120)
    assert not run.is_running
    assert run.wait()["state"] == "drained"


def test_a_job_that_was_stopped_has_a_summary_of_what_was_done(tmp_path):
    with steadfast.local(softmax("stopped", passes=100_000), data_dir=tmp_path, progress=False) as run:
        until_step(run, 10)
        run.stop()
        summary = run.wait(timeout=60)
    assert summary["state"] == "drained" and 10 <= summary["steps"] and summary["checkpoint"]
    assert run.wait() == summary
    # Ctrl-C of another program is no summary that was asked for.
    with steadfast.local(softmax("stopped", passes=100_000), data_dir=tmp_path, progress=False) as run:
        until_step(run, summary["steps"] + 10)
        run._process.send_signal(signal.SIGINT)
        with pytest.raises(steadfast.SteadfastError, match="was stopped; the same call resumes it"):
            run.wait(timeout=60)


class Heard:
    """What callbacks were called with, and in which threads."""

    def __init__(self):
        self.passes, self.evaluations, self.checkpoints, self.threads = [], [], [], set()

    def all(self) -> dict:
        return dict(
            on_pass=self._in(self.passes),
            on_evaluation=self._in(self.evaluations),
            on_checkpoint=self._in(self.checkpoints),
        )

    def _in(self, events):
        def callback(event):
            self.threads.add(threading.current_thread())
            events.append(event)

        return callback


def test_callbacks_hear_of_each_pass_once_in_the_thread_that_waits(tmp_path):
    """Also of a job that is killed, stopped and resumed, and by a program that waits a little at a time."""
    heard, passes = Heard(), 400
    job = softmax("heard", passes=passes, checkpoint=dict(every_steps=40), evaluation=dict(fraction=0.2, patience=1000))
    with steadfast.local(job, data_dir=tmp_path, trainers=1, pservers=1, progress=False, **heard.all()) as run:
        for step in (300, 600):
            until_step(run, step)
            kill(run, "pserver", 0)
        while len(heard.passes) < 100 and run.is_running:
            with contextlib.suppress(TimeoutError):
                run.wait(timeout=0.1)
        run.stop()
        stopped = run.wait()
    done = len(heard.passes)
    assert stopped["passes"] <= done and [it.passes for it in heard.passes] == list(range(1, done + 1))
    assert heard.threads == {threading.current_thread()}
    again = Heard()
    with steadfast.local(job, data_dir=tmp_path, trainers=1, pservers=1, progress=False, **again.all()) as run:
        summary = run.wait(timeout=240)
        assert run.evaluations()[-1].step == summary["steps"]
        best = run.best()
    # The last checkpoint was taken before the processes ended: it may lie a few passes before.
    first = again.passes[0].passes
    assert first <= done + 1 and [it.passes for it in again.passes] == list(range(first, passes + 1))
    assert summary["best"] == {"pass": best.passes, "version": best.step, "loss": best.loss, "metric": best.metric}
    for events in (heard.evaluations + again.evaluations, heard.checkpoints + again.checkpoints):
        assert events and len(set(events)) == len(events)
    assert again.evaluations[-1].passes == passes and again.checkpoints[-1].id == summary["checkpoint"]
    steps = [it.step for it in again.evaluations]
    assert steps == sorted(steps)
    # A job that has ended has no events.
    over = Heard()
    with steadfast.local(job, data_dir=tmp_path, progress=False, **over.all()) as run:
        run.wait(timeout=60)
    assert not over.passes + over.evaluations + over.checkpoints


def test_an_exception_of_a_callback_stops_the_job_as_ctrl_c_does(tmp_path):
    job = softmax("raises-late", passes=100_000)
    error = KeyError("my callback")

    def raises(event):
        raise error

    run = steadfast.local(job, data_dir=tmp_path, progress=False, on_pass=raises)
    with pytest.raises(KeyError) as caught:
        run.wait(timeout=120)
    assert caught.value is error and not run.is_running


def test_callbacks_of_a_job_elsewhere_hear_of_what_happens_from_then_on(tmp_path):
    job = softmax("heard-elsewhere", passes=3000)
    heard = Heard()
    with steadfast.local(job, data_dir=tmp_path, trainers=1, progress=False) as run:
        until(run, lambda: 3 <= run.status().get("pass", 0))
        endpoints = (tmp_path / "etcd-endpoint").read_text().strip()
        other = steadfast.connect(endpoints, "heard-elsewhere", **heard.all())
        with contextlib.suppress(TimeoutError):
            other.wait(timeout=3)
        first, *_ = numbers = [it.passes for it in heard.passes]
        assert 3 < first and numbers == list(range(first, first + len(numbers)))
        assert all(first <= it.passes for it in heard.evaluations)


STARTS_A_JOB = """
import signal, steadfast, sys
dataset = dict(source="../data/linear.csv", format="csv", features=["x*"], label="y")
job = steadfast.Job(name="long", passes=1_000_000, dataset=dataset, model=dict(kind="linear"))
run = steadfast.local(job, data_dir=sys.argv[1], progress=False)
print(run._process.pid, flush=True)
"""


FORKS = "import os\nchild = os.fork()\nif child == 0:\n    signal.pause()\nprint(child, flush=True)\n"
KILLED = "signal.raise_signal(signal.SIGKILL)"


@pytest.mark.parametrize("end", ["", KILLED, FORKS + KILLED])
def test_a_program_that_ends_stops_its_job(tmp_path, end):
    output = tmp_path / "output"
    with open(output, "w") as file:
        program = [sys.executable, "-c", STARTS_A_JOB + end, str(tmp_path)]
        done = subprocess.run(program, stdout=file, timeout=60)
    assert done.returncode == (-signal.SIGKILL if end else 0)
    process, *children = map(int, output.read_text().split())
    try:
        deadline = time.monotonic() + 10
        while is_alive(process) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(process)
    finally:
        for left in filter(is_alive, [process, *children]):
            os.kill(left, signal.SIGTERM)


def is_alive(process: int) -> bool:
    """Whether a process runs; in a container it may stay a zombie after its parent."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_job_elsewhere_is_watched_by_its_name(tmp_path):
    with pytest.raises(steadfast.UnavailableError):
        steadfast.connect("http://127.0.0.1:1", "nothing")
    job = softmax("elsewhere", passes=100_000)
    with steadfast.local(job, data_dir=tmp_path, progress=False) as run:
        until_step(run, 10)
        endpoints = (tmp_path / "etcd-endpoint").read_text().strip()
        other = steadfast.connect(endpoints, "elsewhere")
        assert other.status()["job"] == "elsewhere"
        with pytest.raises(TimeoutError):
            other.wait(timeout=0)
        with pytest.raises(steadfast.NotFoundError):
            steadfast.connect(endpoints, "another")


SEVERAL = """
import steadfast
import steadfast.torch as st
import torch


def top3(output, label):
    return (output.topk(3, dim=1).indices == label[:, None]).any(dim=1).float()


def auc_8(output, label):
    return steadfast.Ranked(output[:, 8], label == 8)


def build(spec):
    torch.manual_seed(0)
    return st.Model(
        torch.nn.Linear(spec.features, 10),
        torch.nn.functional.cross_entropy,
        metrics={"accuracy": st.accuracy, "top3": top3, "auc_8": auc_8},
        losses={"margin": torch.nn.functional.multi_margin_loss},
    )
"""


def several(tmp_path, monkeypatch, name, **evaluation) -> steadfast.Job:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    pathlib.Path("several.py").write_text(SEVERAL)
    dataset = dict(DIGITS, source=str(EXAMPLES / DIGITS["source"]))
    model = dict(kind="python", entry="several:build")
    return softmax(name, passes=4, dataset=dataset, model=model, evaluation=dict(fraction=0.2, **evaluation))


def test_a_job_shows_all_metrics_and_keeps_the_best_by_the_one_that_it_monitors(tmp_path, monkeypatch):
    job = several(tmp_path, monkeypatch, "several", keep="best", monitor="top3", goal="max")
    with steadfast.local(job, data_dir=tmp_path / "data", trainers=2, pservers=2, progress=False) as run:
        summary = run.wait(timeout=300)
    assert summary["metric_name"] == "accuracy"
    further = summary["further_metrics"]
    assert set(further) == {"margin", "top3", "auc_8"} and summary["metric"] <= further["top3"] <= 1
    best = run.best()
    assert best.metrics == {"accuracy": summary["metric"], **further}
    assert all(it.metrics["top3"] <= best.metrics["top3"] for it in run.evaluations())
    assert run.curves()["top3"][-1] == further["top3"]
    # Some eights look like other digits.
    assert 0.9 < further["auc_8"] < 1


def test_a_metric_that_the_model_does_not_have_is_not_monitored(tmp_path, monkeypatch):
    job = several(tmp_path, monkeypatch, "unknown", patience=2, monitor="top4", goal="max")
    with steadfast.local(job, data_dir=tmp_path / "data", trainers=1, pservers=1, progress=False) as run:
        with pytest.raises(steadfast.SteadfastError, match="no such metric; it has accuracy, top3, auc_8, margin"):
            run.wait(timeout=120)


WEIGHTED = """
import steadfast.torch as st
import torch


def loss(output, label, weight):
    each = torch.nn.functional.cross_entropy(output, label, reduction="none")
    return (each * weight).sum(), weight.sum()


def build(spec):
    torch.manual_seed(0)
    metrics = {"accuracy": st.accuracy}
    return st.Model(torch.nn.Linear(spec.features, 2), loss, metrics, reduction="weighted", weight="weight")


def ignoring(spec):
    return st.Model(torch.nn.Linear(spec.features, 2), torch.nn.functional.cross_entropy)
"""


def weighted(name: str, entry: str = "", **dataset) -> steadfast.Job:
    """A job over the records of the current directory; the label of the uneven ones is wrong."""
    lines = [
        f"{at % 7 - 3},{at % 5},{0.25 + at % 3 if at % 2 == 0 else 0},{int(at % 7 > 3) ^ at % 2}" for at in range(600)
    ]
    pathlib.Path("weighted.csv").write_text("\n".join(["x0,x1,w,y", *lines]) + "\n")
    dataset = dict(source="weighted.csv", format="csv", features=["x*"], label="y", **dataset)
    model = dict(kind="softmax", classes=2, class_weights=[1, 3])
    if entry:
        model = dict(kind="python", entry=f"weighing:{entry}")
        pathlib.Path("weighing.py").write_text(WEIGHTED)
    return softmax(name, passes=20, dataset=dataset, model=model)


@pytest.mark.parametrize("entry", ["", "build"])
def test_weights_give_the_same_bits_for_any_number_of_workers(tmp_path, monkeypatch, entry):
    if entry:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    found = []
    for trainers, pservers in ((1, 1), (3, 2)):
        job = weighted("weighted", entry, weight="w")
        directory = tmp_path / f"data-{trainers}"
        with steadfast.local(job, data_dir=directory, trainers=trainers, pservers=pservers, progress=False) as run:
            found.append(run.wait(timeout=300))
    assert found[0]["parameters_sha256"] == found[1]["parameters_sha256"]
    assert found[0]["loss"] == found[1]["loss"]
    # Records with a wrong label do not count.
    assert found[0]["metric"] > 0.8


def test_a_model_that_ignores_weights_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    job = weighted("ignoring", "ignoring", weight="w")
    with steadfast.local(job, data_dir=tmp_path / "data", trainers=1, pservers=1, progress=False) as run:
        with pytest.raises(steadfast.SteadfastError, match="does not use the weights of the records"):
            run.wait(timeout=120)


def test_smaller_steps_are_left_out_and_counted_for_any_number_of_workers(tmp_path):
    found = []
    for trainers, pservers in ((1, 1), (3, 2)):
        job = softmax("full", passes=3, sync=dict(lanes=4, micro_batch=10, drop_last=True))
        directory = tmp_path / f"data-{trainers}"
        with steadfast.local(job, data_dir=directory, trainers=trainers, pservers=pservers, progress=False) as run:
            found.append(run.wait(timeout=300))
        audit = subprocess.run(["steadfast", "audit", "--data-dir", str(directory)], capture_output=True, text=True)
        assert audit.returncode == 0, audit.stdout + audit.stderr
    assert found[0]["parameters_sha256"] == found[1]["parameters_sha256"]
    assert found[0]["examples"] == found[1]["examples"] == 40 * found[0]["steps"]
    assert any(it.startswith("sync.drop_last leaves out") for it in found[0]["warnings"])


def test_a_pass_without_a_full_step_is_refused(tmp_path):
    job = softmax("none", passes=3, sync=dict(lanes=8, micro_batch=1000, drop_last=True))
    with steadfast.local(job, data_dir=tmp_path / "data", trainers=1, pservers=1, progress=False) as run:
        with pytest.raises(steadfast.SteadfastError, match="`sync.drop_last` leaves out all records"):
            run.wait(timeout=120)


def test_classes_of_text_train_as_their_numbers_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [(at % 7 - 3, at % 5, int(at % 7 > 3)) for at in range(400)]
    found = []
    for classes in ([], ["no", "yes"], ["-1", "1"]):
        names = classes or ["0", "1"]
        pathlib.Path("labels.csv").write_text("x0,x1,y\n" + "".join(f"{a},{b},{names[y]}\n" for a, b, y in rows))
        dataset = dict(source="labels.csv", format="csv", features=["x*"], label="y")
        named = dict(classes=classes) if classes else {}
        job = softmax("labels", passes=3, dataset=dict(dataset, **named), model=dict(kind="softmax", classes=2))
        directory = tmp_path / f"data-{len(found)}"
        with steadfast.local(job, data_dir=directory, trainers=1, pservers=1, progress=False) as run:
            found.append(run.wait(timeout=120)["parameters_sha256"])
    assert len(set(found)) == 1
