"""The systems that are compared, and what each of them promises."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Dict, List, NamedTuple, Optional, Sequence

import clicks
import task

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PADDLE = str(ROOT / "target" / "bench-peers-paddle" / "bin" / "python")

CLICKS = (clicks.CLICKS.name,)


class System(NamedTuple):
    name: str
    program: str
    """A file beside this one, called with the directory of the records, the size, and the arguments."""
    arguments: List[str]
    package: str
    """Whose version is shown."""
    needs: str
    """What the program imports, as a statement in Python; the system is not installed if that fails."""
    same_result: str
    """Whether the result is the same, whatever fails."""
    counted_once: str
    """Whether each gradient counts exactly once, whatever fails."""
    python: str = sys.executable
    sizes: Sequence[str] = tuple(task.SIZES)
    """What it trains."""

    def command(self, directory: pathlib.Path, size: str) -> List[str]:
        return [self.python, str(HERE / self.program), str(directory), size, *self.arguments]

    def version(self) -> Optional[str]:
        """Returns the version that is installed, or nothing."""
        program = f"{self.needs}; import importlib.metadata as it; print(it.version('{self.package}'))"
        try:
            done = subprocess.run([self.python, "-c", program], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.split()[-1] if done.returncode == 0 else None


SYSTEMS: Dict[str, System] = {
    "steadfast": System(
        "Steadfast, built-in model, synchronous",
        "train_steadfast.py",
        ["built-in", "sync"],
        "steadfast",
        "import steadfast",
        "yes",
        "yes",
    ),
    "steadfast-async": System(
        "Steadfast, built-in model, asynchronous",
        "train_steadfast.py",
        ["built-in", "async"],
        "steadfast",
        "import steadfast",
        "no",
        "yes",
    ),
    "steadfast-torch": System(
        "Steadfast, PyTorch trainers, synchronous",
        "train_steadfast.py",
        ["torch", "sync"],
        "steadfast",
        "import steadfast.torch",
        "yes",
        "yes",
    ),
    "ddp": System(
        "DistributedDataParallel, gloo",
        "train_ddp.py",
        [],
        "torch",
        "import torch.distributed",
        "no",
        "left to the program and its checkpoints",
    ),
    "rpc": System(
        "parameter servers over `torch.distributed.rpc`, asynchronous",
        "train_rpc.py",
        [],
        "torch",
        "import torch.distributed.rpc as rpc; rpc.init_rpc; rpc.TensorPipeRpcBackendOptions",
        "no",
        "left to the program",
    ),
    "tensorflow": System(
        "ParameterServerStrategy, one step in a closure",
        "train_tensorflow.py",
        ["1"],
        "tensorflow-cpu",
        "import tensorflow",
        "no",
        "no: a closure runs at least once, and may have had a part of its effect before",
    ),
    "tensorflow-10": System(
        "ParameterServerStrategy, ten steps in a closure",
        "train_tensorflow.py",
        ["10"],
        "tensorflow-cpu",
        "import tensorflow",
        "no",
        "no: as above",
    ),
    "paddle": System(
        "Paddle Fleet, parameter servers, asynchronous",
        "train_paddle.py",
        [],
        "paddlepaddle",
        "import paddle.base.core as core; core.DistFleetWrapper",
        "no",
        "left to the program and its checkpoints",
        PADDLE,
    ),
    "clicks-steadfast": System(
        "Steadfast, built-in model, synchronous, 1 trainer, 1 pserver",
        "train_clicks_steadfast.py",
        ["1"],
        "steadfast",
        "import steadfast",
        "yes",
        "yes",
        sizes=CLICKS,
    ),
    "clicks-steadfast-2": System(
        "Steadfast, built-in model, synchronous, 2 trainers, 2 pservers",
        "train_clicks_steadfast.py",
        ["2"],
        "steadfast",
        "import steadfast",
        "yes",
        "yes",
        sizes=CLICKS,
    ),
    "clicks-torch": System(
        "PyTorch, one process, one thread",
        "train_clicks_torch.py",
        ["1"],
        "torch",
        "import torch",
        "no",
        "left to the program and its checkpoints",
        sizes=CLICKS,
    ),
    "clicks-torch-2": System(
        "PyTorch, one process, two threads",
        "train_clicks_torch.py",
        ["2"],
        "torch",
        "import torch",
        "no",
        "left to the program and its checkpoints",
        sizes=CLICKS,
    ),
    "clicks-paddle": System(
        "Paddle Fleet, asynchronous, Adam, 2 workers, 2 servers",
        "train_clicks_paddle.py",
        [],
        "paddlepaddle",
        "import paddle.base.core as core; core.DistFleetWrapper",
        "no",
        "left to the program and its checkpoints",
        PADDLE,
        sizes=CLICKS,
    ),
}
