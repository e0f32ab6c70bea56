"""Benchmarks that cannot take the machine down: each point in a process of its own, recorded before the next begins."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from hilbert_lib.lab.guarded.cases import ATTENTION, Benchmark
from hilbert_lib.lab.records import RESULTS, Kept
from hilbert_lib.lab.tables import sides_of
from hilbert_lib.launch.isolated import OVER_A_LIMIT, run_isolated
from hilbert_lib.limits.config import LONGEST_SECONDS, SafetyConfig
from hilbert_lib.limits.memory import GB, MemorySafetyChecker, host_memory
from hilbert_lib.limits.watch import Watcher

# How a side can end besides "ok" and the faults of `isolated.Ending`. None of these is a fault, and none is remembered:
# a rerun asks again.
CANNOT_SERVE, NOT_TRIED, INTERRUPTED = "cannot serve", "not tried", "interrupted"
NO_FAULT = ("ok", CANNOT_SERVE, NOT_TRIED)


class SafeBenchmarkRunner:
    """Measures points one after another; whatever happens to one costs no other, no process and no memory.

    A side that would not fit into the free memory is not tried. The other sides of a point are measured together in one
    process, under a cap on its memory and a limit on its time. After a fault, those without a record are tried alone,
    each in its own process, and marked unpaired, with the fault as their cause.

    Args:
        path: JSONL file to which each point is added as soon as it has ended; None keeps no file. Points that it holds,
            from this code with these versions (torch, packages) on this hardware, are not measured again, except those
            that met a limit of the machine.
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
            A line a point: "point", "outcomes" (side to "status", "cause" and whether it was "paired"), "records" (of
            the benchmark), "attempts" (of each process its "sides" and what `Ending` says), "key", "environment".

        Raises:
            ValueError: for a point without sides, or that the benchmark does not know.
            OSError: if the file cannot be written, as far as possible before anything is measured.
            KeyboardInterrupt: when it is interrupted, after the running process is ended and what it had measured is
                in the file.
        """
        store, lines = self._kept(), []
        for point in points:
            key, refused, tried = self._asked(point)
            line = store.known.get(key)
            reused = line is not None and _is_finished(line, tried, retry_failed)
            if not reused:
                if self.path is not None:  # before minutes are spent on what could not be kept
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self.path.open("ab").close()
                before = [] if line is None else line["records"]
                line = {"kind": "point", "key": key, "outcomes": refused, "point": point, "records": [], "attempts": []}
                try:
                    self._measure(line, tried)
                finally:  # an interrupted point is recorded too
                    _conclude(line, tried, before)
                    try:
                        line = store.add(line)
                    except OSError:  # who watches sees what could not be written
                        on_point(line, False)
                        raise
            lines.append(line)
            on_point(line, reused)
        return lines

    def would_try(self, point: dict, *, retry_failed: bool = False) -> list[str]:
        """The sides of a point that `run` would measure: none where the file holds it."""
        key, _, tried = self._asked(point)
        line = self._kept().known.get(key)
        return [] if line is not None and _is_finished(line, tried, retry_failed) else tried

    def _kept(self) -> Kept:
        folder, file = ("", RESULTS) if self.path is None else (self.path.parent, self.path.name)
        return Kept(folder, lambda line: line["key"] if line.get("kind") == "point" else None, file=file)

    def _asked(self, point: dict) -> tuple[str, dict[str, dict], list[str]]:
        # What names a point in the file, its sides that are not tried, as `why_not`, and those that are.
        if not isinstance(point, dict) or not point.get("sides"):
            raise ValueError(f"points must be dictionaries with the names of their sides, got {point!r}")
        refused = self.why_not(point)
        serving = [side for side in point["sides"] if refused.get(side, {}).get("status") != CANNOT_SERVE]
        identity = json.dumps([self.benchmark.target, point, serving], sort_keys=True)
        key = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return key, refused, [side for side in point["sides"] if side not in refused]

    def _lack_of_memory(self, point: dict, side: str) -> str:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what this process keeps for later, the point's process could not have
        fits, reason = self._checker.check_memory_available(self.benchmark.inputs(point) / GB)
        if not fits:  # an estimate takes the longer, the longer the sequence is
            return f"{reason}; its inputs alone take so much"
        fits, reason = self._checker.check_memory_available(self.benchmark.estimate(point, side).total_gb)
        return "" if fits else reason

    def _measure(self, line: dict, tried: list[str]) -> None:
        if tried:
            self._attempt(line, tried)
        if len(tried) > 1:
            for side in [side for side in tried if side not in _paired(line["records"])]:
                self._attempt(line, [side])

    def _attempt(self, line: dict, sides: list[str]) -> None:
        on_gpu = self.device.type == "cuda"
        capped = sys.platform == "linux" and not on_gpu  # elsewhere the watch has to do
        host_room, _ = host_memory().room(self.config.max_memory_share, self.config.min_free_host_gb)
        # The process has a time limit of its own, which shows where it hung.
        watched = replace(self.config, max_seconds=LONGEST_SECONDS)
        ending = run_isolated(
            self.benchmark.target,
            [{**line["point"], "sides": sides}],
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


def is_failure(outcome: dict) -> bool:
    """Whether something of a side failed, be it the comparison alone.

    >>> is_failure({"status": "not tried", "cause": "it would not fit", "paired": False})
    False
    """
    return outcome["status"] not in NO_FAULT or (outcome["status"] == "ok" and bool(outcome["cause"]))


def _paired(records: list[dict]) -> dict[str, bool]:
    # Of each side that was measured, whether beside another.
    return {timing["name"]: "a" in record for record in records for timing in sides_of(record)}


def _outcome(status: str, cause: str = "", *, paired: bool = False) -> dict:
    return {"status": status, "cause": cause, "paired": paired}


def _conclude(line: dict, tried: list[str], before: list[dict]) -> None:
    # No side is lost that was measured before.
    lost = _paired(before).keys() - _paired(line["records"]).keys()
    line["records"] = [record for record in before if lost & _paired([record]).keys()] + line["records"]
    paired = _paired(line["records"])
    together = line["attempts"][0] if len(tried) > 1 and line["attempts"] else {"status": "ok"}
    is_lost = together["status"] != "ok"
    fault = "timed alone, since all together: {status}, {cause}".format(**together) if is_lost else ""
    alone = {attempt["sides"][0]: attempt for attempt in line["attempts"] if len(attempt["sides"]) == 1}
    for side in [*tried, *paired]:
        if side in paired:
            line["outcomes"][side] = _outcome("ok", "" if paired[side] else fault, paired=paired[side])
        elif side in alone:
            line["outcomes"][side] = _outcome(alone[side]["status"], alone[side]["cause"])
        else:
            line["outcomes"][side] = _outcome(INTERRUPTED)


def _is_finished(line: dict, tried: list[str], retry_failed: bool) -> bool:
    outcomes = [line["outcomes"].get(side, _outcome(INTERRUPTED)) for side in tried]
    unknown = {INTERRUPTED, NOT_TRIED} & {outcome["status"] for outcome in outcomes}
    # Heat, neighbours or a want of processes: what ended there, or lost its comparison, may not be at fault.
    unknown |= {OVER_A_LIMIT} & {attempt["status"] for attempt in line["attempts"]}
    return not unknown and not (retry_failed and any(is_failure(outcome) for outcome in outcomes))
