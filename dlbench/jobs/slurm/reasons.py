"""Why a job waits, by Slurm's word for it (`squeue`, %r), and what to do where it will not start by itself.

The words are those of Slurm's page of job reason codes and of `slurm.h`.
"""

from __future__ import annotations

import re

_NEVER = (
    (r"DependencyNeverSatisfied", "the job that it waits for ended otherwise than asked"),
    (r"BadConstraints", "no node is as it asks for"),
    (r"PartitionNodeLimit", "it asks for more nodes than its partition allows"),
    (r"PartitionTimeLimit", "it asks for more time than its partition allows"),
    (r"(QOS|Assoc)Max(Wall|Node|Cpu|Mem|GRES|Billing|Energy|BB|Unknown)\w*Per(Job|Node|User)\w*", ""),
    (r"(QOS|Assoc)MaxWall\w*", ""),
    (r"QOSMin\w+|QOSTimeLimit|QOSUsageThreshold", ""),
    (r"InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|\w*NotAllowed", "it may not run where it asks to"),
    (r"ReservationDeleted", "its reservation is gone"),
    (r"JobHoldMaxRequeue|JobLaunchFailure|launch_failed_requeued_held|LaunchFailedRequeuedHeld", "it failed to start"),
)
_LATER = (
    (r"JobHeldUser", "it is held: `scontrol release {id}` lets it start"),
    (r"JobHeldAdmin", "an administrator holds it: ask them"),
    (r"PartitionDown|PartitionInactive", "its partition takes no jobs: ask the administrators, or cancel"),
    (r"(ReqNodeNotAvail|Nodes[ _]required).*", "nodes that it asks for are down, drained or reserved"),
    (r"(QOS|Assoc)(Max|Grp)\w*|AssociationJobLimit|QOSResourceLimit", "a limit of the account or QOS: others must end"),
)
_STUCK = "it never starts so: cancel it, and submit with another request"


def advice_on(reason: str, job_id: str) -> tuple[str, bool]:
    """What a reason means and what to do, and whether the job never starts as it is; empty where it just waits."""
    for pattern, meaning in _LATER[:2]:
        if re.fullmatch(pattern, reason):
            return meaning.format(id=job_id), False
    for pattern, meaning in _NEVER:
        if re.fullmatch(pattern, reason):
            # A limit per user is left when the user's other jobs end, unless this one alone is above it.
            if "PerUser" in reason and "Wall" not in reason:
                return "a limit of the user: it starts when others end, or never if it alone is above it", False
            return f"{meaning or 'it is above a limit of its QOS or account'}; {_STUCK}", True
    for pattern, meaning in _LATER[2:]:
        if re.fullmatch(pattern, reason):
            return meaning, False
    return "", False
