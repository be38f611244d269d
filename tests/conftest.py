"""Fixtures that many tests share, which tests run when, and how they are spread over processes."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.browser import browser
from tests.support.forks import call_dlbench
from tests.support.gpus import hide_gpus, is_for_gpus, why_without_gpu
from tests.support.leftovers import Leftovers
from tests.support.slurm import slurm_box, slurm_can_run, slurm_folder, whole_box

__all__ = ["browser", "slurm_box", "slurm_can_run", "slurm_folder", "whole_box"]


_SPINNING = ("tests/real/test_collectives.py", "tests/real/test_comm_runs.py")
"""Files with many ranks under mpirun."""

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

# No time limits for an example: a busy machine is no error. The same examples each time, so that a change is judged by
# itself; `--hypothesis-profile nightly` looks for new ones.
for _name, _examples in (("default", 25), ("nightly", 200)):
    settings.register_profile(
        _name,
        settings(),
        max_examples=_examples,
        derandomize=_name == "default",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly, too")


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are for the tests of `-m gpu` alone: all others test what runs everywhere, and share no CUDA context.

    `nohup`, and a shell's `&` in a script, start programs that ignore signals. Those that tests start must not.
    """
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)
    if not is_for_gpus(config):
        hide_gpus()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is for the night or for another machine, and says which tests one process of `-n` takes."""
    for item in items:
        if item.get_closest_marker("gpu") and (reason := why_without_gpu(config)):
            item.add_marker(pytest.mark.skip(reason=reason))
    if not config.getoption("--nightly"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    if hasattr(config, "workerinput"):
        # Groups are handed out in the order of their first tests: long ones first, so that both processes end together.
        costly = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("browser")]
        weight = Counter(map(_group, costly))
        items.sort(key=lambda item: -weight[_group(item)])


def _group(item: pytest.Item) -> str:
    """A file's tests share what its fixtures made; all tests that need Slurm share one cluster.

    Ranks of MPI wait by spinning: two groups of them at a time would starve each other, so they are one.
    """
    file = item.nodeid.partition("::")[0]
    return "slurm" if item.get_closest_marker("slurm") or file in _SPINNING else file


def pytest_collection_finish(session: pytest.Session) -> None:
    """Says so where this pytest-xdist does not hand out groups whole, instead of making every fixture many times."""
    if getattr(session.config.option, "loadgroup", False) and session.items:
        assert "@" in session.items[0].nodeid, "this pytest-xdist does not know groups under this pytest"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs ``dlbench`` in a process and a folder of its own."""
    return partial(call_dlbench, cwd=tmp_path)


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    with Leftovers() as found:
        yield found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small networks compute on one thread: more would mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def horovod_installed() -> None:
    """Skips the test that asks for it where Horovod is not installed."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: `dlbench setup horovod` builds it")
