"""``python -m benchmarks [AREA ...]``: runs the benchmarks of some areas, or of all.

Instead of areas: `all` also prints one table of all figures in the end, `table` only prints it, and `keep` takes what
was measured into docs/figures.json and docs/status.md.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import psutil

from benchmarks import (
    checkpoint,
    collectives,
    congestion,
    convergence,
    gate,
    gpu,
    host_work,
    input_rate,
    known_loops,
    ladder,
    memory,
    memory_plan,
    projection,
    rank_memory,
    reader_rate,
    reading,
    shared_work,
    shuffling,
    slurm,
    spine,
    staging,
    strategies,
    table,
    truth,
    truth_sessions,
    wait,
    watching,
)
from benchmarks.figures import Figure, save

# What the field's papers print: congestion, the ladder.
FIELD: dict[str, Callable[[], Iterator[Figure]]] = {
    "figures.congestion": congestion.figures,
    "figures.ladder": ladder.figures,
}

AREAS: dict[str, Callable[[], Iterator[Figure]]] = {
    "spine": spine.measure,
    "workloads": convergence.figures,
    "communication": collectives.figures,
    "checkpoint": checkpoint.figures,
    "watching": watching.figures,
    "wait": wait.figures,
    "reading": reading.figures,
    "reader_rate": reader_rate.figures,
    "input": input_rate.figures,
    "gate": gate.figures,
    "projection": projection.figures,
    "gpu": gpu.figures,
    "shuffling": shuffling.figures,
    "staging": staging.figures,
    "memory": memory.figures,
    "memory-plan": memory_plan.figures,
    "slurm": slurm.figures,
    "truth": truth.figures,
    "truth-sessions": truth_sessions.figures,
    "strategies": strategies.figures,
    "figures": lambda: chain.from_iterable(measure() for measure in FIELD.values()),
}

PARTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "wait.first-step": wait.first_step,
    "wait.series": wait.series,
    "wait.build": wait.build,
    "demo": spine.demo_time,
    "reading.rows": reading.rows,
    "reading.few": reading.few,
    "reading.many": reading.many,
    "reading.large": reading.large,
    "reading.wide": reading.wide,
    "reading.history": reading.history,
    "shuffling.times": shuffling.times,
    "shuffling.accuracies": shuffling.accuracies,
    "communication.levels": collectives.levels,
    "communication.predictions": collectives.predictions,
    "memory.accounts": memory.accounts,
    "memory.methods": memory.methods,
    **{f"memory.hand-{workload}": partial(memory.hand, workload) for workload in memory.HANDS},
    "memory.largest": memory.largest,
    "memory.fitting": memory.fitting,
    "memory.host": memory.host,
    "spine.known-loops": known_loops.figures,
    **{f"spine.known-loops.{ranks}": partial(known_loops.figures, ranks=(ranks,), pairs=9) for ranks in (1, 2)},
    **{f"spine.known-loops.{name}": partial(known_loops.figures, workloads=(name,)) for name in known_loops.STEPS},
    "spine.axes": known_loops.axes,
    "spine.compiled": known_loops.compiled,
    **{f"spine.compiled.{name}": partial(known_loops.compiled, (name,)) for name in known_loops.STEPS},
    "spine.host": host_work.figures,
    "spine.rank-memory": rank_memory.figures,
    **{f"gpu.{workload}": partial(gpu.axes, workload) for workload in gpu.AXES},
    "projection.few": projection.few,
    "projection.held-out": projection.held_out,
    "projection.times": projection.times,
    **{f"slurm.{name}": figures for name, figures in slurm.SUBJECTS.items()},
    **{f"truth.{name}": figures for name, figures in truth.SUBJECTS.items()},
    "truth.projection-quick": truth.projection.quick,
    "strategies.equal": strategies.equal_work,
    "strategies.bytes": strategies.counted_bytes,
    "strategies.update": strategies.sharded_update,
    "strategies.local-sgd": strategies.local_sgd,
    "strategies.memory": strategies.sharded_memory,
    "strategies.spatial": shared_work.spatial,
    "strategies.pipeline": shared_work.pipeline,
    "strategies.asynchronous": shared_work.asynchronous,
    **FIELD,
}
"""Of areas; measured only when named."""


def main(names: list[str]) -> int:
    """Measures, prints and saves; only a wrong name is an error."""
    known = AREAS | PARTS
    if names in (["table"], ["keep"]):
        if names == ["keep"]:
            table.keep()
        print(table.table(table.newest()))
        return 0
    is_all, names = names == ["all"], list(AREAS) if names in ([], ["all"]) else names
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark area {unknown[0]!r}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names:
        figures: list[Figure] = []
        load = psutil.cpu_percent(interval=1) / 100 * (psutil.cpu_count() or 1)  # cores, while this sleeps
        try:
            for figure in known[name]():
                figures.append(figure)
                print(figure.line(), flush=True)
        except Exception as error:  # a benchmark never fails a build; it tells what happened
            traceback.print_exc()
            figures.append(
                Figure(name=f"{name}: rest of the area", value=None, unit="", goal="measured", reason=repr(error))
            )
            print(figures[-1].line())
        print(f"saved to {save(name, figures, load)}")
    if is_all:
        print(table.table(table.newest()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
