"""``python -P -m dlbench.supervisor [--launcher] (-m MODULE | PROGRAM) WORDS``: a program, ended with all it started.

Every rank is started by one, whatever launches ranks; so are mpirun and srun, where `dlbench run` starts them
(`--launcher`). To whoever started it, it looks like the program: signals go through, and it ends as the program ended,
by the same exit code or signal. What it adds:

- When the program has ended, for whatever reason, nothing that it started lives on, and its temporary folder and its
  shared memory are gone (`dlbench.process_tree`).
- When the process that started it ends, for whatever reason, it ends the program. The kernel tells; who started it is
  in DLBENCH_PARENT, so that an end in the first instant is noticed, too.
- When it is killed itself, the kernel kills the program.
- A rank that ended without a word gets its last status written (`dlbench.final_status`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NoReturn

from dlbench import process_tree
from dlbench.final_status import VARIABLE, FinalStatus, wall_time

GRACE_S = 1.0
"""What a program and its descendants have between SIGTERM and SIGKILL. mpirun gives as much to what it started."""

AFTER_S = 2.0
"""What descendants have after the program ended by itself: the sampler writes what it holds, perhaps over a network."""

LAUNCHER_GRACE_S = 2.5  # The same for a launcher, whose ranks have supervisors of their own.

_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP, signal.SIGXCPU),
)
_PARENT_ENDED = signal.SIGRTMIN + 8
"""Sent by the kernel. Not SIGTERM: it also comes when no more than the thread ended that started this process, and
Open MPI starts many ranks from threads that it ends."""

_RANK_VARIABLES = ("DLBENCH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_AWAITED = frozenset((*_FORWARDED, signal.SIGCHLD, _PARENT_ENDED))
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


class Supervisor:
    """One program. `is_launcher`: the program starts ranks that have supervisors."""

    def __init__(self, command: Sequence[str], *, is_launcher: bool) -> None:
        self._command = list(command)
        self._is_launcher = is_launcher
        self._grace_s = LAUNCHER_GRACE_S if is_launcher else GRACE_S
        self._parent = 0
        self._program = 0
        self._status: int | None = None
        self._folders: list[process_tree.HeldFolder] = []
        self._final: tuple[FinalStatus, int] | None = None
        """Of a rank, with a descriptor of its run's folder."""

    def run(self) -> int:
        """The program's status as `os.wait` gives it, after everything that it started has ended."""
        # Taken from the queue by sigtimedwait; the default action would come first otherwise.
        mask: set[int] = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        parent = os.environ.pop("DLBENCH_PARENT", "")
        self._parent = int(parent) if parent.isdigit() else os.getppid()
        process_tree.end_with_parent(_PARENT_ENDED, self._parent)
        process_tree.adopt_orphans()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if signal.SIGTERM in signal.sigpending() or os.getppid() != self._parent:
            return signal.SIGTERM
        environment = self._prepare(dict(os.environ))
        supervisor = os.getpid()
        self._program = os.fork()
        if self._program == 0:
            self._become_program(environment, supervisor, mask)
        try:
            is_told = self._wait()
            ended_at = wall_time()
            if not is_told:
                self._tell(ended_at)
            grace_s = self._grace_s if is_told or self._is_launcher else AFTER_S
            process_tree.end(self._descendants, grace_s, look=self._reap)
            if self._final is not None:
                self._final[0].write(self._final[1])
        finally:
            for folder in self._folders:
                folder.remove()
            process_tree.remove_abandoned(process_tree.temporary_places(os.environ))
        return self._status if self._status is not None else signal.SIGKILL

    def _prepare(self, environment: dict[str, str]) -> dict[str, str]:
        """Gives the program folders of its own; without one it uses those of the machine."""
        # Modules come from where they are installed, never from the working directory.
        environment["PYTHONSAFEPATH"] = "1"
        if "dlbench.node" in self._command:
            with suppress(OSError):
                # The last word is the plan. The run's folder itself is no link (`dlbench.records.folder.create`).
                flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
                folder = os.open(self._command[-1].rpartition("/")[0] or ".", flags | os.O_DIRECTORY)
                self._final = FinalStatus.make(), folder
                environment[VARIABLE] = str(self._final[0].descriptor)
        with suppress(OSError):
            own = process_tree.HeldFolder(process_tree.temporary_places(environment))
            self._folders.append(own)
            if self._is_launcher:
                # Where Open MPI's mpirun keeps its session, by version 4 and 5; the nodes' daemons keep to their own.
                environment.setdefault("OMPI_MCA_orte_local_tmpdir_base", own.path)
                environment.setdefault("PRTE_MCA_prte_local_tmpdir_base", own.path)
            else:
                environment["TMPDIR"] = own.path
        if not self._is_launcher and any(name in environment for name in _MPI_VARIABLES):
            # Meant for mpirun, which says to its ranks in another variable what came of it; they refuse to have both.
            environment.pop("OMPI_MCA_orte_local_tmpdir_base", None)
            with suppress(OSError):
                shared = process_tree.HeldFolder([process_tree.SHARED_MEMORY])
                self._folders.append(shared)
                # Open MPI's shared memory between ranks, by version 4 and 5: each rank tells the others its path.
                environment.setdefault("OMPI_MCA_btl_vader_backing_directory", shared.path)
                environment.setdefault("OMPI_MCA_btl_sm_backing_directory", shared.path)
        return environment

    def _become_program(self, environment: dict[str, str], supervisor: int, mask: set[int]) -> NoReturn:
        try:
            process_tree.end_with_parent(signal.SIGKILL, supervisor)
            os.setsid()
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would the program
                signal.signal(number, signal.SIG_DFL)
            # A rank finds this one pending (dlbench.node.training.pauses); it must end none of its helpers.
            is_rank = not self._is_launcher and "dlbench.node" in self._command  # mpirun and srun pass it on
            held = {signal.SIGUSR1} if is_rank else set()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask | held)
            os.execvpe(self._command[0], self._command, environment)  # noqa: S606  (no shell is wanted)
        except OSError as error:
            print(f"dlbench: error: {self._command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
            sys.stderr.flush()
        finally:
            os._exit(127)

    def _wait(self) -> bool:
        """Returns when the program has ended, or is to end; whether it is to end."""
        while True:
            number = signal.sigwait(_AWAITED)
            if number == signal.SIGCHLD:
                self._reap()
                if self._status is not None:
                    return False
            elif number == signal.SIGTERM or os.getppid() != self._parent:
                return True
            elif number != _PARENT_ENDED:
                with suppress(ProcessLookupError):
                    os.killpg(self._program, number)

    def _descendants(self) -> set[int]:
        # Without a child there is no descendant, as all orphans become children.
        return process_tree.descendants(os.getpid()) if self._reap() else set()

    def _reap(self) -> bool:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._program:
                self._status = status

    def _tell(self, ended_at: float) -> None:
        """Says, before anything is cleaned up, that the program did not end well; the first rank is the cause.

        The launcher of dlbench reads a mark; into the log of a job goes what the rank could not say: that a signal
        ended it (read again by dlbench.records.job_log).
        """
        if not self._status:
            return
        rank = next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), "0")
        rank = process_tree.LAUNCHER if self._is_launcher else rank
        code = os.waitstatus_to_exitcode(self._status)
        with suppress(OSError):  # nobody reads
            if os.environ.get("DLBENCH_PROGRESS") == "launcher":
                os.write(1, f"{process_tree.ENDED_MARK}{rank} {code} {ended_at:.6f}\n".encode())
            elif code < 0 and not self._is_launcher and "dlbench.node" in self._command:
                at = datetime.fromtimestamp(ended_at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                name = signal.Signals(-code).name if -code in set(signal.Signals) else f"number-{-code}"
                os.write(2, f"dlbench: rank {rank} was ended by signal {name} at {at}\n".encode())


def end_as(status: int) -> NoReturn:
    """Ends this process as another one ended, without a second core dump."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs a program and ends as it ended."""
    words = list(arguments)
    is_launcher = words[:1] == ["--launcher"]
    words = words[is_launcher:]
    if not words:
        print("usage: python -P -m dlbench.supervisor [--launcher] (-m MODULE | PROGRAM) ARGUMENTS", file=sys.stderr)
        sys.exit(2)
    if words[0] == "-m":
        words = [sys.executable, "-P", *words]
    end_as(Supervisor(words, is_launcher=is_launcher).run())


if __name__ == "__main__":
    main(sys.argv[1:])
