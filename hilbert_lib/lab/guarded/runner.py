"""Benchmarks that cannot take the machine down: each point in a process of its own, recorded before the next begins."""

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from hilbert_lib.lab.environment import MACHINE, environment
from hilbert_lib.lab.guarded.cases import ATTENTION, Benchmark
from hilbert_lib.lab.records import append_lines, read_records
from hilbert_lib.launch.isolated import OVER_A_LIMIT, Ending, run_isolated
from hilbert_lib.limits.config import LONGEST_SECONDS, SafetyConfig
from hilbert_lib.limits.memory import GB, MemorySafetyChecker, host_memory
from hilbert_lib.limits.watch import Watcher

# How a side can end beside "ok" and the faults of `isolated.Ending`. None of these is a fault, and none is remembered:
# a rerun asks again.
CANNOT_SERVE, NOT_TRIED, INTERRUPTED = "cannot serve", "not tried", "interrupted"
NO_FAULT = ("ok", CANNOT_SERVE, NOT_TRIED)
# What a rerun needs of a point's line.
KEPT = {"key": str, "point": dict, "outcomes": dict, "records": list, "attempts": list}


class SafeBenchmarkRunner:
    """Measures points one after another; whatever happens to one costs no other, no process and no memory.

    A point is first held against what memory is free: a side that would not fit is not tried. The others are measured
    together in one process, under a cap on its memory and a limit on its time. After a fault, those without a record
    are tried alone, each in its own process, and marked unpaired, with the fault as their cause.

    Args:
        path: JSONL file to which a line is added for each point as soon as it has ended, safe on the disk; None keeps
            no file. Points that stand in it, measured by this code with these versions (torch, packages) on this
            hardware, are not measured again, except those that met a limit of the machine: also one that they meet each
            time, such as the watched memory of the host, so that every rerun spends their time anew.
        benchmark: what to run.
        config: the limits; by default as `SafetyConfig.load` finds them.
        device: whose memory is guarded; by default the first CUDA device that there is, otherwise the CPU.

    Raises:
        TypeError: for a benchmark or a config that is none.
        ValueError: for a path of a pipe or a device, which could not be read again.

    >>> from hilbert_lib import DilatedPattern
    >>> from hilbert_lib.lab.guarded.cases import attention_points
    >>> too_long = attention_points(DilatedPattern((4,), (1,)), lengths=[2**22], backends=["reference"])
    >>> SafeBenchmarkRunner(device="cpu").run(too_long)[0]["outcomes"]["reference"]["status"]
    'not tried'
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        benchmark: Benchmark = ATTENTION,
        config: SafetyConfig | None = None,
        device: torch.device | str | None = None,
    ):
        if not isinstance(benchmark, Benchmark):
            raise TypeError(f"benchmark must be a Benchmark, got {benchmark!r}")
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise ValueError(f"path must be no pipe or device, since it is read again; got {path}")
        self.benchmark = benchmark
        self._checker = MemorySafetyChecker(config, device, for_child=True)
        self.config, self.device = self._checker.config, self._checker.device

    def why_not(self, point: dict) -> dict[str, dict]:
        """The sides of a point that will not be tried: each with its outcome, which says why."""
        refused = {}
        for side in point["sides"]:
            if reason := self.benchmark.refusal(point, side):
                refused[side] = _outcome(CANNOT_SERVE, reason)
            elif reason := self._lack_of_memory(point, side):
                refused[side] = _outcome(NOT_TRIED, reason)
        return refused

    def _lack_of_memory(self, point: dict, side: str) -> str:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what this process keeps for later, the point's process could not have
        fits, reason = self._checker.check_memory_available(self.benchmark.inputs(point) / GB)
        if not fits:  # an estimate takes the longer, the longer the sequence is
            return f"{reason}; its inputs alone take so much"
        fits, reason = self._checker.check_memory_available(self.benchmark.estimate(point, side).total_gb)
        return "" if fits else reason

    def run(
        self,
        points: Iterable[dict],
        *,
        retry_failed: bool = False,
        on_point: Callable[[dict, bool], object] = lambda line, reused: None,
    ) -> list[dict]:
        """Measure the points that the file does not hold.

        Args:
            points: each a dictionary that JSON can hold, with the names of its "sides".
            retry_failed: try those again in which a side failed, or was timed alone since all together failed.
            on_point: called with each point's line, and whether it was found in the file.

        Returns:
            A line a point: "point", "outcomes" (side to "status", "cause" and whether it was "paired"), "records" (as
            `bench` writes them), "attempts" (of each process its "sides" and what `Ending` says), "key", "utc".

        Raises:
            ValueError: for a point without sides, or that the benchmark does not know.
            OSError: if the file cannot be written, as far as it can be known before anything is measured.
            KeyboardInterrupt: when it is interrupted, after the running process is ended and what it had measured is
                in the file.
        """
        known, lines = self._known(), []
        for point in points:
            key, refused, tried = self._asked(point)
            line = known.get(key)
            reused = line is not None and _is_finished(line, tried, retry_failed)
            if not reused:
                self._check_writable()  # before minutes are spent on what could not be kept
                before = [] if line is None else line["records"]
                line = known[key] = {"kind": "point", "key": key, "outcomes": refused}
                try:
                    self._measure(point, tried, line, before)
                except OSError:  # who watches sees what could not be written all the same
                    on_point(line, False)
                    raise
            lines.append(line)
            on_point(line, reused)
        return lines

    def would_try(self, point: dict, *, retry_failed: bool = False) -> list[str]:
        """The sides of a point that `run` would measure: none where the file holds it.

        Args:
            point, retry_failed: as in `run`.
        """
        key, _, tried = self._asked(point)
        line = self._known().get(key)
        return [] if line is not None and _is_finished(line, tried, retry_failed) else tried

    def _asked(self, point: dict) -> tuple[str, dict[str, dict], list[str]]:
        """What names a point in the file, its sides that are not tried, as `why_not`, and those that are."""
        if not isinstance(point, dict) or not point.get("sides"):
            raise ValueError(f"points must be dictionaries with the names of their sides, got {point!r}")
        facts, refused = environment(), self.why_not(point)
        serving = [side for side in point["sides"] if refused.get(side, {}).get("status") != CANNOT_SERVE]
        identity = [self.benchmark.target, point, serving, *(facts.get(name) for name in MACHINE)]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        return key, refused, [side for side in point["sides"] if side not in refused]

    def _known(self) -> dict[str, dict]:
        """The points of the file by key."""
        if self.path is None or not self.path.exists():
            return {}
        known = {}
        for line in read_records(self.path):
            if line.get("kind") == "point" and all(isinstance(line.get(name), kind) for name, kind in KEPT.items()):
                known[line["key"]] = line
            elif line.get("kind") == "point":
                warnings.warn(f"{self.path}: a point without {', '.join(KEPT)} is skipped", stacklevel=3)
        return known

    def _check_writable(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()

    def _measure(self, point: dict, tried: list[str], line: dict, before: list[dict]) -> None:
        line |= {"point": point, "records": [], "attempts": []}
        together, endings = None, {}
        try:
            if tried:
                together = self._attempt(point, tried, line)
                missing = [side for side in tried if side not in _paired(line["records"])]
                for side in missing:
                    endings[side] = together if len(tried) == 1 else self._attempt(point, [side], line)
        finally:  # an interrupted point is recorded too, and no side is lost that was measured before
            lost = _paired(before).keys() - _paired(line["records"]).keys()
            line["records"] = [each for each in before if lost & _paired([each]).keys()] + line["records"]
            line["outcomes"] |= _outcomes(tried, _paired(line["records"]), endings, together)
            line["utc"] = datetime.now(UTC).isoformat(timespec="seconds")
            if self.path is not None:
                append_lines([line], self.path)

    def _attempt(self, point: dict, sides: list[str], line: dict) -> Ending:
        on_gpu = self.device.type == "cuda"
        capped = sys.platform == "linux" and not on_gpu  # elsewhere the watch has to do
        host_room, _ = host_memory().room(self.config.max_memory_share, self.config.min_free_host_gb)
        # The process has a time limit of its own, which shows where it hung.
        watched = replace(self.config, max_seconds=LONGEST_SECONDS)
        ending = run_isolated(
            self.benchmark.target,
            [{**point, "sides": sides}],
            seconds=self.config.max_seconds,
            on_record=line["records"].append,
            watch=lambda pid: Watcher(watched, self.device, pid=pid, on_limit=lambda cause: None),
            host_bytes=host_room if capped else None,
            gpu_share=self.config.max_memory_share if on_gpu else None,
            device=str(self.device),
        )
        if ending.status == "ok" and not _paired(line["records"]).keys() >= set(sides):
            ending = replace(ending, status="failed", cause="it ended without a record")
        line["attempts"].append({"sides": sides, **vars(ending)})
        return ending


def _paired(records: list[dict]) -> dict[str, bool]:
    """Of each side that was measured, whether beside another."""
    paired = {}
    for record in records:
        sides = (record["a"], record["b"]) if "a" in record else (record,)
        paired |= {side["name"]: len(sides) > 1 for side in sides}
    return paired


def _outcomes(
    tried: list[str], paired: dict[str, bool], endings: dict[str, Ending], together: Ending | None
) -> dict[str, dict]:
    outcomes = dict.fromkeys(tried, _outcome(INTERRUPTED))
    outcomes |= {side: _outcome(ending.status, ending.cause) for side, ending in endings.items()}
    is_lost = len(tried) > 1 and together is not None and together.status != "ok"
    alone = f"timed alone, since all together: {together.status}, {together.cause}" if is_lost else ""
    return outcomes | {side: _outcome("ok", "" if beside else alone, paired=beside) for side, beside in paired.items()}


def _outcome(status: str, cause: str = "", *, paired: bool = False) -> dict:
    return {"status": status, "cause": cause, "paired": paired}


def _is_finished(line: dict, tried: list[str], retry_failed: bool) -> bool:
    outcomes = [line["outcomes"].get(side, _outcome(INTERRUPTED)) for side in tried]
    unknown = {INTERRUPTED, NOT_TRIED} & {outcome["status"] for outcome in outcomes}
    # Heat, neighbours or a want of processes: what ended there, or lost its comparison, may not be at fault.
    unknown |= {OVER_A_LIMIT} & {attempt["status"] for attempt in line["attempts"]}
    return not unknown and not (retry_failed and any(is_failure(outcome) for outcome in outcomes))


def is_failure(outcome: dict) -> bool:
    """Whether something failed of a side, be it the comparison alone.

    >>> is_failure({"status": "not tried", "cause": "it would not fit", "paired": False})
    False
    """
    return outcome["status"] not in NO_FAULT or (outcome["status"] == "ok" and bool(outcome["cause"]))
