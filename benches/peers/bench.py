"""Compares Steadfast with other systems on this machine; see docs/performance.md.

make bench-peers
make bench-peers ARGS="--rounds 3 --only ddp,steadfast --size small"
make bench-peers ARGS="--size clicks"
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from typing import Dict, List, NamedTuple, Optional, Union

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "python"))

import clicks  # noqa: E402
import closures  # noqa: E402
import recoveries  # noqa: E402
import recovery  # noqa: E402
import task  # noqa: E402
from systems import SYSTEMS, System  # noqa: E402

Size = Union[task.Size, clicks.Clicks]
SIZES: Dict[str, Size] = {**task.SIZES, clicks.CLICKS.name: clicks.CLICKS}
RECORDS = ROOT / "target" / "bench-peers" / "records"
SAMPLE_SECONDS = 0.25
"""Between two looks at the CPU time of a system."""
LIMIT_SECONDS = 180.0
FALLEN = 0.9
"""A final loss below this part of the loss at random is one that has fallen."""


class Sample(NamedTuple):
    """One run of a system."""

    rate: float
    """Units of the size per second: steps of all workers, or thousands of records."""
    cpu: float
    """Seconds of all processes for each of them."""
    loss: float
    """Of the final parameters."""
    error: Optional[str] = None


def failed(why: str) -> Sample:
    return Sample(0.0, 0.0, 0.0, why)


class CpuTime:
    """The CPU time of a process and all that it starts, over time."""

    def __init__(self, process: recovery.Process):
        self._process = process
        self._by_pid: Dict[int, float] = {}
        self._samples: List[tuple] = []

    def sample(self) -> None:
        for pid in self._process.pids():
            try:
                fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                # It has ended; its time until the last sample counts.
                continue
            self._by_pid[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self._samples.append((time.time(), sum(self._by_pid.values())))

    def at(self, when: float) -> float:
        """Returns the seconds that were used until a time, interpolated between samples."""
        for (start, used), (end, more) in zip(self._samples, self._samples[1:]):
            if start <= when <= end:
                return used + (more - used) * (when - start) / (end - start)
        return self._samples[-1][1]


def measure(key: str, system: System, size: Size, limit: float) -> Sample:
    """Runs a system once. Its processes have ended afterwards, also if it hangs."""
    with tempfile.TemporaryDirectory() as directory:
        logs = pathlib.Path(directory)
        process = recovery.Process(key, system.command(RECORDS, size.name), logs)
        cpu = CpuTime(process)
        deadline = time.monotonic() + limit
        try:
            while process.code() is None:
                if deadline < time.monotonic():
                    return failed(f"no result within {limit:.0f} s")
                cpu.sample()
                time.sleep(SAMPLE_SECONDS)
        finally:
            recovery.kill(process.pids())
            process.reap()
        result = logs / "result.json"
        if not result.exists():
            log = process.log.read_text(errors="replace")
            print(f"{system.name}, {size.name}:\n{log[-3000:]}", file=sys.stderr)
            return failed("failed")
        found = json.loads(result.read_text())
    start, end, units = found["start"], found["end"], found["units"]
    return Sample(units / (end - start), (cpu.at(end) - cpu.at(start)) / units, found["loss"])


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if 100 <= value else f"{value:.3g}"


def row(key: str, samples: Dict[str, List[Sample]], size: Size, version: Optional[str]) -> str:
    """The line of a system in the table of a size."""
    system = SYSTEMS[key]
    promises = [system.same_result, system.counted_once]
    if version is None:
        return line([system.name, "not installed", "", "", "", "", *promises])
    if not samples[key]:
        return line([system.name, version, "not measured", "", "", "", *promises])
    good = [it for it in samples[key] if it.error is None]
    if not good:
        return line([system.name, version, samples[key][0].error or "", "", "", "", *promises])
    rates = sorted(it.rate for it in good)
    loss = statistics.median(it.loss for it in good)
    rate = f"{number(statistics.median(rates))} ({number(rates[0])} to {number(rates[-1])})"
    if len(good) < len(samples[key]):
        rate += f"; {len(samples[key]) - len(good)} of {len(samples[key])}: {bad(samples[key])}"
    # Compared within a round, so that what else the machine does meets both sides.
    pairs = zip(samples[key], samples.get(size.baseline, []))
    ratios = [it.rate / base.rate for it, base in pairs if it.error is None and base.error is None]
    ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
    # Also if the loss is no number.
    if not loss < FALLEN * size.loss_at_random:
        rate, ratio = f"not comparable ({rate})", ""
    cpu = statistics.median(it.cpu for it in good)
    return line([system.name, version, rate, ratio, f"{number(1000 * cpu)} ms", f"{loss:.3g}", *promises])


def bad(samples: List[Sample]) -> str:
    return ", ".join(sorted({it.error for it in samples if it.error}))


def line(cells: List[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(size: Size, samples: Dict[str, List[Sample]], versions: Dict[str, Optional[str]]) -> None:
    print(f"\n{size.name}: {size.describe(RECORDS)}, loss at random {size.loss_at_random:.2f}\n")
    head = [
        "system",
        "version",
        f"{size.units} per second (range)",
        f"relative to {size.baseline_name}",
        f"CPU time per {size.unit}",
        "final loss",
        "same result whatever fails",
        "each gradient counts once, whatever fails",
    ]
    print(line(head))
    print("|" + "---|" * len(head))
    for key in samples:
        print(row(key, samples, size, versions[key]))


def selected(words: str, names: List[str], flag: str) -> List[str]:
    chosen = words.split(",") if words else names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        sys.exit(f"bench-peers: {flag} {','.join(unknown)}: choose from {','.join(names)}")
    return [name for name in names if name in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help=f"of {','.join([*SYSTEMS, 'recovery', 'closures'])}")
    parser.add_argument("--size", default="", help=f"of {','.join(SIZES)}")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for one run of a system")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "target" / "bench-peers.json")
    args = parser.parse_args()
    chosen = selected(args.only, [*SYSTEMS, "recovery", "closures"], "--only")
    names = selected(args.size, list(SIZES), "--size")
    sizes = [SIZES[name] for name in names]
    keys = [key for key in chosen if key in SYSTEMS and set(names) & set(SYSTEMS[key].sizes)]
    # Jobs of that size are killed.
    with_recovery = "recovery" in chosen and "small" in names
    # One thread in each process, also where a library would choose by itself. Where a system has two, a thread that
    # waits yields its core, which another process may have.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

    versions = {key: SYSTEMS[key].version() for key in keys}
    samples: Dict[str, Dict[str, List[Sample]]] = {
        size.name: {key: [] for key in keys if size.name in SYSTEMS[key].sizes} for size in sizes
    }
    times = recoveries.Times()

    def write() -> None:
        found = {
            "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
            "versions": versions,
            "steps": {
                size: {key: [it._asdict() for it in found] for key, found in by_key.items()}
                for size, by_key in samples.items()
            },
            "recoveries": times.as_json(),
        }
        args.json.write_text(json.dumps(found, indent=1))

    for size in task.SIZES.values():
        task.write(RECORDS, size)
    if clicks.CLICKS in sizes:
        clicks.write(RECORDS, clicks.CLICKS)

    def measure_round(number_of_round: int) -> None:
        for size in sizes:
            for key in samples[size.name]:
                if versions[key] is None:
                    continue
                sample = measure(key, SYSTEMS[key], size, args.limit)
                samples[size.name][key].append(sample)
                shown = sample.error or f"{number(sample.rate)} {size.units} per second"
                say(f"round {number_of_round}, {size.name}, {SYSTEMS[key].name}: {shown}")
                write()
        if with_recovery:
            times.measure_all(RECORDS, lambda what: say(f"round {number_of_round}, recovery, {what}"))
            write()

    done = 0
    try:
        while done < args.rounds:
            measure_round(done + 1)
            done += 1
    except KeyboardInterrupt:
        say("interrupted; the tables have what was measured")
    load = os.getloadavg()[2]
    print(f"{os.cpu_count()} cores, load of the last 15 minutes {load:.1f}, {done} rounds")
    for size in sizes:
        if samples[size.name]:
            table(size, samples[size.name], versions)
    if with_recovery:
        times.print_table()
    if "closures" in chosen:
        with tempfile.TemporaryDirectory() as directory:
            closures.compare(args.rounds, pathlib.Path(directory), say)


if __name__ == "__main__":
    main()
