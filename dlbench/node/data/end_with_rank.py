"""Makes loader processes and their fork server end with their rank; the fork server imports this module first.

Otherwise both would stay when the rank is killed: loader processes keep open the pipe whose end tells the fork server
to stop, and watch only the fork server. The kernel kills the fork server with the rank, and each loader with the fork
server (prctl(2), PR_SET_PDEATHSIG).
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
        if not is_loader:  # processes that a loader forks have another parent
            is_loader = True
            end_with_parent(signal.SIGKILL, fork_server)

    end_with_parent(signal.SIGKILL, int(rank))
    os.register_at_fork(after_in_child=end_with_fork_server)


_begin()
