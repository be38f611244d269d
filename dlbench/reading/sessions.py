"""Sessions: runs that share the state of a machine, and so are no independent looks at it.

All runs of one allocation meet the same nodes, neighbours, clocks and page cache; all runs of one command without a
scheduler the same hour of one machine. What differs between sessions does not show in the scatter within one (Hoefler
and Belli, SC'15, rule 5 on variation between allocations), so a claim about a machine counts sessions, not runs.
"""

from __future__ import annotations

from dlbench.records.scan import Run


def session_of(run: Run) -> str:
    """A name equal for exactly those runs that share a session: Slurm's job or, outside of one, the series."""
    environment = {} if run.record is None else run.record.environment
    job = environment.get("variable.SLURM_JOB_ID", "")
    if job:
        return f"job {environment.get('variable.SLURM_CLUSTER_NAME', '')}/{job}"
    return f"series {run.plan.series.id}"
