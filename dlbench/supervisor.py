"""``python -P -m dlbench.supervisor [--launcher] (-m MODULE | PROGRAM) WORDS``: runs a program and cleans up after it.

It starts every rank, and mpirun and srun for `dlbench run` (`--launcher`). It forwards signals and ends with the exit
code or signal of the program. In addition:

- After the end of the program for any reason, all its descendants are ended, and its temporary folder and its shared
  memory are removed (`dlbench.process_tree`).
- At the end of its parent for any reason, it ends the program. The kernel signals that end; the pid of the parent is in
  DLBENCH_PARENT, so that an end before the start of this process is detected, too.
- If it is killed itself, the kernel kills the program.
- It writes the last status of a rank that crashed (`dlbench.final_status`).
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
"""Seconds between SIGTERM and SIGKILL for a program and its descendants, equal to those of mpirun."""

AFTER_S = 2.0
"""Seconds for descendants after the program ended by itself: the sampler writes its buffer, perhaps over a network."""

LAUNCHER_GRACE_S = 2.5  # Seconds between SIGTERM and SIGKILL for a launcher, whose ranks have supervisors.

_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP, signal.SIGXCPU),
)
_PARENT_ENDED = signal.SIGRTMIN + 8
"""Signal of the kernel at the end of the parent. Not SIGTERM, because it also comes at the end of the thread that
started this process, and Open MPI starts many ranks from threads that it ends."""

_RANK_VARIABLES = ("DLBENCH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_AWAITED = frozenset((*_FORWARDED, signal.SIGCHLD, _PARENT_ENDED))
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


class Supervisor:
    """The supervisor of a program. `is_launcher`: the program starts ranks that have supervisors."""

    def __init__(self, command: Sequence[str], *, is_launcher: bool) -> None:
        self._command = list(command)
        self._is_launcher = is_launcher
        self._grace_s = LAUNCHER_GRACE_S if is_launcher else GRACE_S
        self._parent = 0
        self._program = 0
        self._status: int | None = None
        self._folders: list[process_tree.HeldFolder] = []
        self._final: tuple[FinalStatus, int] | None = None
        """The status of a rank, with a descriptor of its run's folder."""

    def run(self) -> int:
        """Runs the program; returns its status (see `os.wait`) after the end of all its descendants."""
        # Blocked, so that sigwait receives them instead of the default action.
        mask: set[int] = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        parent = os.environ.pop("DLBENCH_PARENT", "")
        self._parent = os.getppid()
        if parent.isdigit():
            self._parent = int(parent)
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
            was_asked_to_end = self._wait()
            ended_at = wall_time()
            grace_s = self._grace_s
            if not was_asked_to_end:
                self._report_failure(ended_at)
                if not self._is_launcher:
                    grace_s = AFTER_S
            process_tree.end(self._descendants, grace_s, look=self._reap)
            if self._final is not None:
                self._final[0].write(self._final[1])
        finally:
            for folder in self._folders:
                folder.remove()
            process_tree.remove_abandoned(process_tree.temporary_places(os.environ))
        return self._status if self._status is not None else signal.SIGKILL

    def _prepare(self, environment: dict[str, str]) -> dict[str, str]:
        """Returns the program's environment, with private temporary folders if they can be made."""
        # Modules are imported from the installation, never from the working directory.
        environment["PYTHONSAFEPATH"] = "1"
        if "dlbench.node" in self._command:
            with suppress(OSError):
                # The last word is the plan's path. The run's folder is no link (`dlbench.records.folder.create`).
                flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
                folder = os.open(self._command[-1].rpartition("/")[0] or ".", flags | os.O_DIRECTORY)
                self._final = FinalStatus.make(), folder
                environment[VARIABLE] = str(self._final[0].descriptor)
        with suppress(OSError):
            held_folder = process_tree.HeldFolder(process_tree.temporary_places(environment))
            self._folders.append(held_folder)
            if self._is_launcher:
                # Session folder of Open MPI's mpirun, versions 4 and 5; the daemons of nodes use their own.
                environment.setdefault("OMPI_MCA_orte_local_tmpdir_base", held_folder.path)
                environment.setdefault("PRTE_MCA_prte_local_tmpdir_base", held_folder.path)
            else:
                environment["TMPDIR"] = held_folder.path
        if not self._is_launcher and any(name in environment for name in _MPI_VARIABLES):
            # For mpirun only, which sets another variable for its ranks; they refuse to have both.
            environment.pop("OMPI_MCA_orte_local_tmpdir_base", None)
            with suppress(OSError):
                shared = process_tree.HeldFolder([process_tree.SHARED_MEMORY])
                self._folders.append(shared)
                # Open MPI's shared memory between ranks, versions 4 and 5: each rank sends its path to the others.
                environment.setdefault("OMPI_MCA_btl_vader_backing_directory", shared.path)
                environment.setdefault("OMPI_MCA_btl_sm_backing_directory", shared.path)
        return environment

    def _become_program(self, environment: dict[str, str], supervisor: int, mask: set[int]) -> NoReturn:
        try:
            process_tree.end_with_parent(signal.SIGKILL, supervisor)
            os.setsid()
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that
                signal.signal(number, signal.SIG_DFL)
            # A rank polls for this signal (dlbench.node.training.pauses); it must not end its helpers.
            if not self._is_launcher and "dlbench.node" in self._command:
                mask = mask | {signal.SIGUSR1}
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(self._command[0], self._command, environment)  # noqa: S606  (no shell is wanted)
        except OSError as error:
            print(f"dlbench: error: {self._command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
            sys.stderr.flush()
        finally:
            os._exit(127)

    def _wait(self) -> bool:
        """Waits until the program has ended (returns False), or is to be ended (returns True)."""
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
        # Without a child there is no descendant, because all orphans become children.
        if not self._reap():
            return set()
        return process_tree.descendants(os.getpid())

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

    def _report_failure(self, ended_at: float) -> None:
        """Reports a failed program before cleaning up; the first rank that reports is the cause.

        The launcher of dlbench reads a marked line; in a job's log a line reports the signal that ended the rank (read
        by dlbench.records.job_log).
        """
        if not self._status:
            return
        rank = next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), "0")
        if self._is_launcher:
            rank = process_tree.LAUNCHER
        code = os.waitstatus_to_exitcode(self._status)
        with suppress(OSError):  # no reader
            if os.environ.get("DLBENCH_PROGRESS") == "launcher":
                os.write(1, f"{process_tree.ENDED_MARK}{rank} {code} {ended_at:.6f}\n".encode())
            elif code < 0 and not self._is_launcher and "dlbench.node" in self._command:
                at = datetime.fromtimestamp(ended_at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                name = f"number-{-code}"
                if -code in set(signal.Signals):
                    name = signal.Signals(-code).name
                os.write(2, f"dlbench: rank {rank} was ended by signal {name} at {at}\n".encode())


def end_as(status: int) -> NoReturn:
    """Ends this process with the exit code or signal of another one, without a second core dump."""
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
    """Runs a program and ends with its exit code or signal."""
    words = list(arguments)
    is_launcher = words[:1] == ["--launcher"]
    if is_launcher:
        words = words[1:]
    if not words:
        print("usage: python -P -m dlbench.supervisor [--launcher] (-m MODULE | PROGRAM) ARGUMENTS", file=sys.stderr)
        sys.exit(2)
    if words[0] == "-m":
        words = [sys.executable, "-P", *words]
    end_as(Supervisor(words, is_launcher=is_launcher).run())


if __name__ == "__main__":
    main(sys.argv[1:])
