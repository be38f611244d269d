"""Imported by the fork server of loader processes, before all else: it and they end with their rank, however it ends.

Loader processes hold the pipe by which a fork server sees that nobody needs it, and they watch the fork server alone:
without this, both would stay when the rank is killed. The kernel notifies the fork server of the rank's end and each
loader of the fork server's (prctl(2), PR_SET_PDEATHSIG), from the first instruction of a loader on.
"""

from __future__ import annotations

import os
import signal

from dlbench.process_tree import end_with_parent


def _begin() -> None:
    rank = os.environ.pop("DLBENCH_LOADERS_OF", "")  # set by dlbench.node.data.loader
    if not rank.isdigit():
        return
    fork_server = os.getpid()
    is_loader = False

    def end_with_fork_server() -> None:
        nonlocal is_loader
        if not is_loader:  # what a loader may fork has another parent
            is_loader = True
            end_with_parent(signal.SIGKILL, fork_server)

    end_with_parent(signal.SIGKILL, int(rank))
    os.register_at_fork(after_in_child=end_with_fork_server)


_begin()
