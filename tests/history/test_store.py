"""The history store: folders are the truth, the index a cache; killed and many writers, no space, no permission."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.comparability import group_id
from dlbench.analysis.metrics import metrics_by_run
from dlbench.analysis.table import tabulate
from dlbench.cli.report import runs_at
from dlbench.errors import RunError, UserError
from dlbench.history import importing as history_entries
from dlbench.history.entry import PLAIN, HistoryEntry, HostEntry, from_line, matches, parse_where, to_line
from dlbench.history.history import SPARE_LINES, History
from dlbench.history.importing import content_digest, make_entries, open_history
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.scan import read_run, scan
from tests.support.collectives_factory import comm_plans, write_comm_run
from tests.support.history_factory import history_plan, import_folder, tree, write_history
from tests.support.run_factory import NOW, Story, constant, edit_json, write_run, write_unfinished

STEP = constant([5, 0, 30, 50, 0, 10])


def write_runs(out: Path, count: int, first: int = 0) -> Path:
    for number in range(first, first + count):
        plan = history_plan(number, 9.0 * number, points=(1,))
        write_run(out, plan, STEP, Story(finished=NOW + timedelta(days=9 * number)))
    return out


def new_history(path: Path) -> History:
    return open_history(path, create=True, notify=[].append)


def imported(path: Path, runs: Path) -> History:
    history = new_history(path)
    import_folder(history, runs)
    return history


def verdicts(outcomes: Sequence[object]) -> list[str]:
    return [outcome.verdict for outcome in outcomes]


def dlbench(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dlbench", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of twelve runs; tests that change it take a copy."""
    store = tmp_path_factory.mktemp("history") / "store"
    write_history(
        store,
        [(9.0 * number, 1 + number / 100) for number in range(12)],
        commit=lambda number: f"c{number // 4}",
        host=lambda number, rank: f"n{rank}",
        slow_rank=lambda number, rank: 1.25 if rank == 1 else 1.0,
    )
    return store


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


# What an entry says


def test_entries_hold_what_the_run_says(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    environment = {"host": "n0", "dlbench.commit": "abc", "variable.SLURM_JOB_ID": "77"}
    modules = {"system.modules": "gcc/13.2"}
    plan = history_plan(3, 4.0, {"night": "yes"}, points=(2,), overrides=modules)
    write_run(runs, plan, STEP, Story(environment=environment, host=lambda rank: f"n{rank}", finished=NOW))
    history = new_history(tmp_path / "store")
    assert verdicts(import_folder(history, runs)) == ["imported"]
    (entry,) = history.entries()
    run = read_run(runs / plan.run_id)
    assert entry.folder == f"runs/2026-03/{plan.run_id}"
    assert history.run_folder(entry) == tmp_path / "store" / entry.folder
    assert (entry.state, entry.why, entry.group) == ("valid", "", group_id(run))
    assert (entry.commit, entry.slurm_job_id, entry.tags) == ("abc", "77", {"night": "yes"})
    assert (entry.created, entry.finished) == ("2026-03-05T12:00:00Z", "2026-03-01T12:00:00Z")
    # What was asked of the system, too: other modules may be why a level changed.
    assert entry.environment == {
        **environment,
        **modules,
        "system.modules_reset": "purge",
        "dlbench.version": plan.dlbench_version,
    }
    assert entry.key == (entry.group, 2, 1)
    label = "sample, tiny preset, horovod, fp32, batch 4 per rank, synthetic data, weak scaling"
    assert entry.label == f"{label}, system.modules=gcc/13.2"
    assert entry.figures == metrics_by_run(tabulate(scan(runs)))[plan.run_id]
    assert entry.figures["step_median_s"] == pytest.approx(0.095)
    assert entry.hosts == tuple(HostEntry(host=f"n{rank}", num_ranks=1, work_ratio=1.0) for rank in range(2))


def test_the_digest_is_as_documented(tmp_path: Path) -> None:
    folder = write_run(tmp_path, history_plan(0, 0, points=(2,)), STEP)
    (folder.path / "rank-0000.log").write_text("talk")
    digest = hashlib.sha256()
    for name in ("node-0000.steps", "plan.json", "record.json"):
        content = (folder.path / name).read_bytes()
        digest.update(name.encode() + b"\0" + str(len(content)).encode() + b"\0" + content)
    assert content_digest(folder) == digest.hexdigest()


def test_a_commit_tag_stands_before_the_checkout_and_a_submission_tells_the_job(tmp_path: Path) -> None:
    plan = history_plan(0, 0, {"commit": "tagged"}, points=(1,))
    folder = write_run(tmp_path / "runs", plan, STEP, Story(environment={"dlbench.commit": "abc"}))
    write_json(
        folder.submission,
        {"format": "dlbench.submission", "version": 1, "job_id": "4711", "command": [], "submitted": "2026-03-01"},
    )
    history = imported(tmp_path / "store", tmp_path / "runs")
    assert [(entry.commit, entry.slurm_job_id) for entry in history.entries()] == [("tagged", "4711")]


def test_hosts_are_compared_as_slow_nodes_does(made: Path) -> None:
    for entry in open_history(made).entries():
        assert {host.host: host.work_ratio for host in entry.hosts} == pytest.approx({"n0": 0.8, "n1": 1.25})


def test_a_planted_fault_accuses_no_host(tmp_path: Path) -> None:
    store = tmp_path / "store"
    fault = {"fault.ranks": 1, "fault.compute_factor": 1.5}
    write_history(store, [(0.0, 1.0)], host=lambda number, rank: f"n{rank}", overrides=fault)
    (entry,) = open_history(store).entries()
    assert [host.work_ratio for host in entry.hosts] == [None, None]


def test_entries_survive_the_index(made: Path) -> None:
    odd = {"figures": '}, "figures": {', '"environment": {': "}", "a\n\t": "\u00e9\\"}
    entries = open_history(made).entries()
    for number, environment in enumerate((odd, {}, odd)):
        entries[number] = dataclasses.replace(
            entries[number], environment=environment, label="a\tlabel\n", repeat=number
        )
    for told in (entries, entries[:1], entries[:2], entries[:3] * 5):
        line = to_line(told)
        assert from_line(line, len(told)) == told
        assert not {"\n", "\t"} & set(line)
    with pytest.raises(ValueError, match="zip"):
        from_line(to_line(entries), len(entries) + 1)
    with pytest.raises(TypeError, match="of_another_version"):
        from_line(to_line(entries).replace('"why"', '"of_another_version"'), len(entries))


# Bringing runs in


def test_folders_are_copied_whole_and_stay(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", 3)
    (next(runs.iterdir()) / "checkpoints").mkdir()
    (next(runs.iterdir()) / "checkpoints" / "step-00000001.safetensors").write_bytes(b"state")
    history = new_history(tmp_path / "store")
    assert verdicts(import_folder(history, runs)) == ["imported"] * 3
    before = tree(tmp_path / "store" / "runs")
    assert {name.split("/", 1)[1]: content for name, content in before.items()} == tree(runs)
    assert verdicts(import_folder(history, runs)) == ["already there"] * 3
    assert verdicts(import_folder(open_history(tmp_path / "store"), runs)) == ["already there"] * 3
    assert tree(tmp_path / "store" / "runs") == before
    assert list((tmp_path / "store" / "partial").iterdir()) == []


def test_other_content_of_the_same_name_is_refused(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", 2)
    history = imported(tmp_path / "store", runs)
    before = tree(tmp_path / "store" / "runs")
    changed = sorted(runs.iterdir())[0]
    edit_json(changed / "record.json", finished="2027-01-01T00:00:00Z")
    outcomes = import_folder(history, runs)
    assert verdicts(outcomes) == ["refused", "already there"]
    assert changed.name in outcomes[0].why
    assert tree(tmp_path / "store" / "runs") == before


def test_a_run_that_is_there_twice_comes_in_once(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", 1)
    one = next(runs.iterdir())
    shutil.copytree(one, runs / "copy")
    history = new_history(tmp_path / "store")
    assert sorted(verdicts(import_folder(history, runs))) == ["already there", "imported"]
    assert [entry.run_id for entry in history.entries()] == [one.name]
    assert Path(history.entries()[0].folder).name == one.name


def test_what_a_history_does_not_keep(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", 1, first=1)
    write_unfinished(runs, history_plan(2, 0, points=(1,)))
    write_unfinished(runs, history_plan(3, 0, points=(1,)), "failed", "no memory left")
    check = {"name": "finite loss", "passed": False, "detail": "loss not finite"}
    write_run(runs, history_plan(4, 0, points=(1,)), STEP, Story(state="invalid", checks=[check]))
    torn = write_run(runs, history_plan(5, 0, points=(1,)), STEP)
    torn.node_steps(0).write_bytes(torn.node_steps(0).read_bytes()[:-3])
    (runs / "z-empty").mkdir()
    linked = write_run(runs, history_plan(6, 0, points=(1,)), STEP)
    (linked.path / "data").symlink_to("/etc/passwd")
    deep = write_run(runs, history_plan(7, 0, points=(1,)), STEP)
    (deep.path / "a" / "b" / "c" / "d").mkdir(parents=True)
    history = new_history(tmp_path / "store")
    told = {outcome.name: outcome for outcome in import_folder(history, runs)}
    found = {name.split("-")[0]: outcome.verdict for name, outcome in told.items()}
    wanted = dict.fromkeys(("h0001", "h0003", "h0004"), "imported") | {"h0002": "skipped"}
    assert found == wanted | dict.fromkeys(("h0005", "h0006", "h0007", "z"), "damaged")
    assert all(outcome.why for outcome in told.values() if outcome.verdict != "imported")
    states = {entry.run_id[:5]: (entry.state, entry.why) for entry in history.entries()}
    assert states["h0003"][0] == "failed"
    assert "no memory left" in states["h0003"][1]
    assert states["h0004"] == ("invalid", "finite loss: loss not finite")
    assert len(states) == 3


def test_runs_of_the_collective_benchmark_are_passed_over(tmp_path: Path) -> None:
    write_comm_run(tmp_path / "runs", comm_plans()[0])
    outcomes = import_folder(new_history(tmp_path / "store"), tmp_path / "runs")
    assert verdicts(outcomes) == ["skipped"]
    assert "collective" in outcomes[0].why


def test_a_run_that_goes_on_is_not_taken_in(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", 1)

    def make_and_write(folders: Sequence[RunFolder]) -> Sequence[HistoryEntry]:
        entries = make_entries(folders)
        for folder in folders:
            with folder.node_steps(0).open("ab") as file:
                file.write(b"more")
        return entries

    history = History(tmp_path / "store", make_and_write, "test", create=True)
    outcomes = import_folder(history, runs)
    assert verdicts(outcomes) == ["skipped"]
    assert "still active" in outcomes[0].why
    assert history.entries() == []
    assert list((tmp_path / "store" / "partial").iterdir()) == []


def test_a_store_is_told_from_other_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a history"):
        open_history(tmp_path / "nothing")
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UserError, match="has other files"):
        open_history(tmp_path, create=True)
    write_json(tmp_path / "history.json", {"format": "dlbench.history", "version": 99})
    with pytest.raises(Exception, match="version"):
        open_history(tmp_path)


# The index is a cache


def renamed(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0].replace('"version": "', '"version": "other ') + "".join(lines[1:]))


@pytest.mark.parametrize(
    ("harm", "is_told"),
    [
        (Path.unlink, False),
        (lambda path: path.write_bytes(b""), True),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), True),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), True),
        (lambda path: path.write_text(path.read_text().replace('"workload"', '"of_another"', 1)), True),
        (renamed, True),
    ],
    ids=["no file", "empty", "truncated", "no end of line", "other fields", "other version"],
)
def test_a_harmed_index_is_made_anew(store: Path, harm: Callable[[Path], object], is_told: bool) -> None:
    before = open_history(store).entries()
    harm(store / "index.jsonl")
    notes: list[str] = []
    assert open_history(store, notify=notes.append).entries() == before
    assert len(notes) == is_told
    assert all("rebuilt" in note for note in notes)
    notes.clear()
    assert open_history(store, notify=notes.append).entries() == before
    assert notes == []


def test_an_index_of_many_short_lines_is_written_anew(store: Path, tmp_path: Path) -> None:
    index = store / "index.jsonl"
    head, *lines = index.read_text().splitlines(keepends=True)
    index.write_text(head + "".join(lines * (SPARE_LINES + 1)))
    history = open_history(store)
    assert verdicts(import_folder(history, write_runs(tmp_path / "runs", 1, first=20))) == ["imported"]
    assert len(index.read_text().splitlines()) == 2
    assert open_history(store).entries() == history.entries()


def test_folders_that_come_and_go_are_noticed(store: Path, tmp_path: Path) -> None:
    history = open_history(store)
    first, *rest = history.entries()
    shutil.move(history.run_folder(first), tmp_path / "away")
    assert open_history(store).entries() == rest
    shutil.move(tmp_path / "away", history.run_folder(first))
    assert open_history(store).entries() == [first, *rest]
    record = RunFolder(history.run_folder(first)).record
    write_json(record, {**json.loads(record.read_text()), "finished": "2020-01-01T00:00:00Z"})
    assert open_history(store).entries()[0].finished == "2020-01-01T00:00:00Z"


def test_a_run_in_two_folders_counts_once(store: Path) -> None:
    history = open_history(store)
    first = history.entries()[0]
    shutil.copytree(history.run_folder(first), store / "runs" / "2030-01" / first.run_id)
    found = [entry for entry in open_history(store).entries() if entry.run_id == first.run_id]
    assert sorted(entry.state for entry in found) == ["damaged", "valid"]
    assert next(entry.why for entry in found if entry.state == "damaged").count(first.run_id) >= 2
    held = [run.folder.path for run in runs_at(store).runs if run.plan.run_id == first.run_id]
    assert held == [history.run_folder(first)]


# Killed writers, many writers


def test_what_dead_writers_left_is_swept_away(tmp_path: Path) -> None:
    history = new_history(tmp_path / "store")
    partial = tmp_path / "store" / "partial"
    young, old = partial / "2.00000000", partial / "1.00000000"
    # What no room is called, somebody else has put there.
    foreign = [partial / name for name in ("thesis", "2.0", "2.00000000.txt", ".2.00000000")]
    for folder in (young, old, *foreign):
        (folder / "run").mkdir(parents=True)
    day_ago = time.time() - 90_000
    for folder in (old, *foreign):
        os.utime(folder, (day_ago, day_ago))
    import_folder(history, write_runs(tmp_path / "runs", 1))
    assert sorted(partial.iterdir()) == sorted([young, *foreign])


DAY_AGO = time.time() - 90_000


def precious(path: Path, *names: str) -> dict[str, bytes]:
    """Folders of somebody else, old enough to be swept away."""
    for name in names:
        (path / name).mkdir(parents=True)
        (path / name / "chapter").write_text("years of work")
        os.utime(path / name, (DAY_AGO, DAY_AGO))
    return tree(path)


def aim_partial(store: Path, victim: Path) -> None:
    shutil.rmtree(store / "partial")
    (store / "partial").symlink_to(victim)


def aim_room(store: Path, victim: Path) -> None:
    (store / "partial" / "2.00000000").symlink_to(victim)
    os.utime(store / "partial" / "2.00000000", (DAY_AGO, DAY_AGO), follow_symlinks=False)


@pytest.mark.parametrize("aim", [aim_partial, aim_room])
def test_nothing_behind_a_link_is_swept_away(store: Path, tmp_path: Path, aim: Callable[[Path, Path], None]) -> None:
    before = precious(tmp_path / "victim", "thesis", "2.00000000")
    aim(store, tmp_path / "victim")
    history = open_history(store)
    if aim is aim_partial:
        with pytest.raises(UserError, match="partial: is a link, not a folder of this history; remove it"):
            import_folder(history, write_runs(tmp_path / "runs", 1, first=20))
        assert len(open_history(store).entries()) == 12
    else:
        assert verdicts(import_folder(history, write_runs(tmp_path / "runs", 1, first=20))) == ["imported"]
    assert tree(tmp_path / "victim") == before


def test_a_link_that_comes_between_leads_nowhere(store: Path, tmp_path: Path) -> None:
    history = open_history(store)
    entries = history.entries()
    month = (store / entries[0].folder).parent
    victim = tmp_path / "victim"
    before = precious(victim, *(Path(entry.folder).name for entry in entries))
    shutil.move(month, tmp_path / "aside")
    month.symlink_to(victim)
    with history.store.room() as room:
        staged = room / "batch-1" / "run"
        (staged).mkdir(parents=True)
        with pytest.raises(RunError, match=f"{month}: is a link, not a folder"):
            history.store.place(staged, f"runs/{month.name}/new")
        shutil.move(room / "batch-1", tmp_path / "batch")
        (room / "batch-1").symlink_to(victim)
        history.store.delete_staged(room / "batch-1" / Path(entries[0].folder).name)
        history.store.delete_staged(room / "batch-1")
    assert tree(victim) == before


@pytest.mark.slow
def test_killed_imports_leave_nothing_half(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", 150)
    whole = {folder.name: content_digest(RunFolder(folder)) for folder in runs.iterdir()}
    chance = random.Random(5)
    for attempt in range(3):
        store = tmp_path / f"store-{attempt}"
        counts = killed_imports(runs, store, whole, chance)
        if counts[0] < len(whole):
            break  # else the first import was over before this process had a core to end it
    assert 0 < counts[0] < len(whole)
    assert set(verdicts(import_folder(open_history(store), runs))) <= {"imported", "already there"}
    assert {entry.run_id: entry.content_digest for entry in open_history(store).entries()} == whole


def killed_imports(runs: Path, store: Path, whole: dict[str, str], chance: random.Random) -> list[int]:
    """How many runs are there after each of four imports that are killed; each of them is whole and in the index."""
    counts = []
    for _ in range(4):
        process = dlbench("history", "import", runs, "--store", store)
        before = len(list((store / "runs").glob("*/*")))
        deadline = time.monotonic() + 60
        # Somewhere within the import: not before its first run is in place, a little later each time.
        while len(list((store / "runs").glob("*/*"))) == before < len(whole) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        there = {path.name: content_digest(RunFolder(path)) for path in (store / "runs").glob("*/*")}
        assert there.items() <= whole.items()
        assert {entry.run_id: entry.content_digest for entry in open_history(store).entries()} == there
        counts.append(len(there))
    return counts


@pytest.mark.slow
def test_many_writers_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", 24)
    folders = sorted(runs.iterdir())
    store = tmp_path / "store"
    # Every run is brought by two or more of them, and all make the store.
    shares = [folders[:16], folders[8:], folders[::2], folders[::-1]]
    processes = [dlbench("history", "import", *share, "--store", store) for share in shares]
    output = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(shares), output
    told = [
        sum(int(n) for n in re.findall(r"(\d+) imported$|(\d+) imported,", text)[0] if n) if "imported" in text else 0
        for text in output
    ]
    assert sum(told) == len(folders), output
    wanted = {folder.name: content_digest(RunFolder(folder)) for folder in folders}
    assert {entry.run_id: entry.content_digest for entry in open_history(store).entries()} == wanted
    assert list((store / "partial").iterdir()) == []


# No permission, no space


def in_own_mounts(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A shell script in mounts of its own, which end with it."""
    return subprocess.run(
        ["unshare", "--mount", "bash", "-euc", script, "bash", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def require_own_mounts() -> None:
    if shutil.which("unshare") is None or in_own_mounts("mount -t tmpfs none /mnt").returncode != 0:
        pytest.skip("mounts of one's own need root")


@pytest.mark.parametrize("has_index", [True, False])
def test_a_store_that_cannot_be_written_is_read(store: Path, has_index: bool) -> None:
    require_own_mounts()
    listed = open_history(store).entries()
    if not has_index:
        (store / "index.jsonl").unlink()
    script = (
        'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; "$2" -m dlbench history list --store "$1" --format json'
    )
    done = in_own_mounts(script, store, sys.executable)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"] == [json.loads(json.dumps(one.to_dict())) for one in listed]
    assert ("kept in memory" in done.stderr) == (not has_index)
    refused = in_own_mounts(
        script.replace("list", "import").replace("--format json", '"$1"/runs/2026-03'), store, sys.executable
    )
    assert refused.returncode == 2
    assert "cannot be written" in refused.stderr


def test_a_full_disk_leaves_nothing_half(tmp_path: Path) -> None:
    require_own_mounts()
    runs = write_runs(tmp_path / "runs", 2)
    big = sorted(runs.iterdir())[1]
    (big / "launch.log").write_bytes(os.urandom(3_000_000))
    (tmp_path / "store").mkdir()
    done = in_own_mounts(
        'mount -t tmpfs -o size=2m none "$1";'
        '"$3" -m dlbench history import --store "$1" "$2" && exit 9 || echo "ended with $?";'
        'find "$1/partial" "$1/runs" -type f | sort; "$3" -m dlbench history list --store "$1"',
        tmp_path / "store",
        runs,
        sys.executable,
    )
    assert done.returncode == 0, done.stderr
    assert "ended with 5" in done.stdout
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert big.name not in done.stdout


# Choosing runs


ENTRY = HistoryEntry(
    run_id="r", folder="runs/2026-03/r", state="valid", why="", created="c", finished="f", series="s", repeat=0,
    side="", variant="plain", group="g", label="l", system="sys", workload="w", preset="p", engine="e", ranks=2,
    nodes=1, slurm_job_id="", commit="", tags={}, environment={}, figures={}, hosts=(), content_digest="d",
)  # fmt: skip


names, hosts, tags = st.sampled_from(["a", "b", ""]), st.sampled_from(["n0", "n1", ""]), st.text("xy", max_size=1)
ranks = st.sampled_from(["1", "2", "x"])
properties = {"workload": names, "ranks": ranks, "host": hosts, "tag.k": tags, "environment.k": tags}


@given(
    st.lists(st.tuples(names, st.sampled_from([1, 2]), hosts, tags), max_size=8),
    st.fixed_dictionaries({}, optional=properties),
)
def test_where_is_the_conjunction(rows: list[tuple[str, int, str, str]], where: dict[str, str]) -> None:
    for workload, ranks, host, tag in rows:
        entry = dataclasses.replace(
            ENTRY,
            workload=workload,
            ranks=ranks,
            hosts=(HostEntry(host=host, num_ranks=1, work_ratio=None),) if host else (),
            tags={"k": tag} if tag else {},
            environment={"k": tag + tag},
        )
        values = {"workload": workload, "ranks": str(ranks), "host": host, "tag.k": tag, "environment.k": tag + tag}
        assert matches(entry, where) == all(values[key] == value for key, value in where.items())


def test_where_names_what_is_wrong() -> None:
    assert parse_where(["workload=a=b", "tag.x="]) == {"workload": "a=b", "tag.x": ""}
    assert all(matches(ENTRY, {key: str(getattr(ENTRY, key))}) for key in PLAIN)
    for texts, words in (
        (["workload"], "KEY=VALUE"),
        (["worklaod=a"], "did you mean workload"),
        (["ranks=1", "ranks=2"], "twice"),
    ):
        with pytest.raises(UserError, match=words):
            parse_where(texts)


# What changes meanwhile


def test_a_run_that_goes_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted(write_runs(tmp_path, 2).iterdir())

    def tabulate_and_lose(*arguments: Any, **options: Any) -> Any:
        table = tabulate(*arguments, **options)
        shutil.rmtree(first)
        return table

    monkeypatch.setattr(history_entries, "tabulate", tabulate_and_lose)
    entries = make_entries([RunFolder(first), RunFolder(second)])
    assert [entry.state for entry in entries] == ["damaged", "valid"]


def test_errors_of_the_file_system_are_named(store: Path) -> None:
    shutil.rmtree(store / "runs")
    (store / "runs").write_text("no folder")
    with pytest.raises(RunError, match="runs"):
        open_history(store)
