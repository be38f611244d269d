"""Archives of a history: equal bytes for equal runs, whole round trips, and hostile ones that get nowhere."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dlbench.errors import EnvironmentLacksError, IncompleteDataError, UserError
from dlbench.history.archive import ArchiveLimits, read_archive, write_archive
from dlbench.history.history import History
from dlbench.history.importing import ImportOutcome, import_runs, open_history
from tests.support.history_factory import tree, write_history

POINTS = [(20.0 * number, 1 + number / 50) for number in range(4)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of four runs, one of them with a checkpoint; no test changes it."""
    store = tmp_path_factory.mktemp("archive") / "store"
    history = write_history(store, POINTS)
    folder = history.run_folder(history.entries()[1])
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-00000004.safetensors").write_bytes(b"state" * 1000)
    (store / "index.jsonl").unlink()
    return store


@pytest.fixture(scope="module")
def archive(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("archive") / "all.tar"
    history = open_history(made)
    write_archive(history, history.entries(), output)
    return output


def bring(path: Path, store: Path, limits: ArchiveLimits | None = None) -> tuple[History, list[ImportOutcome]]:
    history = open_history(store, create=True)
    with history.store.room() as room:
        outcomes = list(import_runs(history, read_archive(path, room, limits), room))
    assert list((store / "partial").iterdir()) == []
    return history, outcomes


def verdicts(outcomes: list[ImportOutcome]) -> list[str]:
    return [outcome.verdict for outcome in outcomes]


# Round trips


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz"])
def test_what_goes_out_comes_in(made: Path, tmp_path: Path, name: str) -> None:
    source = open_history(made)
    write_archive(source, source.entries(), tmp_path / name)
    history, outcomes = bring(tmp_path / name, tmp_path / "store")
    assert verdicts(outcomes) == ["imported"] * 4
    assert history.entries() == source.entries()
    assert tree(tmp_path / "store" / "runs") == tree(made / "runs")
    assert verdicts(bring(tmp_path / name, tmp_path / "store")[1]) == ["already there"] * 4


@pytest.mark.parametrize("name", ["one.tar", "one.tar.gz"])
def test_equal_runs_give_equal_bytes(made: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy", copy_function=shutil.copyfile))
    contents = []
    for number, store in enumerate((made, copy)):
        history = open_history(store)
        output = tmp_path / str(number) / name
        output.parent.mkdir()
        # The order in which runs are asked for does not matter, nor what the file is called.
        write_archive(history, history.entries()[:: -1 if number else 1], output)
        contents.append(output.read_bytes())
    assert contents[0] == contents[1]


def test_other_programs_read_it(made: Path, archive: Path) -> None:
    with tarfile.open(archive) as opened:
        names = opened.getnames()
        assert {(one.uid, one.gid, one.uname, one.mtime, one.mode) for one in opened} == {(0, 0, "", 0, 0o644)}
        manifest = json.loads(opened.extractfile("manifest.json").read())  # type: ignore[union-attr]
    assert names == ["manifest.json", *(f"runs/{name}" for name in tree(made / "runs"))]
    assert manifest["runs"] == {entry.folder: entry.content_digest for entry in open_history(made).entries()}
    assert archive.stat().st_size % tarfile.RECORDSIZE == 0


def repacked(source: Path, output: Path, tar_format: int = tarfile.GNU_FORMAT, root: str = "") -> Path:
    with tarfile.open(output, "w:gz" if output.suffix == ".gz" else "w", format=tar_format) as opened:
        opened.add(source, root or source.name)
    return output


@pytest.mark.parametrize("root", ["runs", "./deep/down/runs", "."])
def test_archives_of_tar_are_read(made: Path, tmp_path: Path, root: str) -> None:
    history, outcomes = bring(repacked(made / "runs", tmp_path / "a.tar.gz", root=root), tmp_path / "store")
    assert verdicts(outcomes) == ["imported"] * 4
    assert history.entries() == open_history(made).entries()


def test_a_single_run_without_a_folder(made: Path, tmp_path: Path) -> None:
    entry = open_history(made).entries()[1]
    _, outcomes = bring(repacked(made / entry.folder, tmp_path / "a.tar", root="."), tmp_path / "store")
    assert verdicts(outcomes) == ["imported"]
    assert tree(tmp_path / "store" / entry.folder) == tree(made / entry.folder)


def test_folders_that_are_no_runs_are_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("nothing")
    _, outcomes = bring(repacked(tmp_path / "x", tmp_path / "a.tar"), tmp_path / "store")
    assert verdicts(outcomes) == ["skipped"]
    assert outcomes[0].why == "it contains no run"


def test_a_changed_run_is_not_exported(made: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(made, tmp_path / "copy"))
    history = open_history(store)
    with (history.run_folder(history.entries()[2]) / "node-0000.steps").open("ab") as file:
        file.write(b"x")
    with pytest.raises(IncompleteDataError, match="changed"):
        write_archive(history, history.entries(), tmp_path / "a.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    with pytest.raises(UserError, match="cannot be written"):
        write_archive(history, history.entries()[:1], tmp_path / "nowhere" / "a.tar")


# Damage


def test_a_run_that_the_list_names_and_that_is_not_there(made: Path, tmp_path: Path) -> None:
    history = open_history(made)
    first, *_ = history.entries()
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as opened:
        content = json.dumps(
            {
                "format": "dlbench.history-archive",
                "version": 1,
                "runs": {first.folder: first.content_digest, "runs/x": ""},
            }
        ).encode()
        add(opened, "manifest.json", content)
        opened.add(history.run_folder(first), first.folder)
    path = tmp_path / "a.tar"
    path.write_bytes(output.getvalue())
    _, outcomes = bring(path, tmp_path / "store")
    assert sorted(verdicts(outcomes)) == ["damaged", "imported"]
    # A run that is not what the list says does not come in.
    path.write_bytes(output.getvalue().replace(first.content_digest.encode(), b"0" * 64))
    history, outcomes = bring(path, tmp_path / "other")
    assert verdicts(outcomes) == ["damaged", "damaged"]
    assert history.entries() == []


def test_files_may_come_in_any_order(made: Path, tmp_path: Path) -> None:
    first = sorted((made / "runs").glob("*/*"))[0]
    more = ("checkpoints/old/x", "notes/y")
    files = sorted((file for file in (made / "runs").rglob("*") if file.is_file()), key=lambda file: file.name)
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as opened:
        for name in more:
            add(opened, f"{first.relative_to(made)}/{name}", b"z")
        add(opened, f"{first.relative_to(made)}/.hidden", b"z")
        for file in files:
            opened.add(file, file.relative_to(made))
        add(opened, "stray.txt", b"z")
    history, outcomes = bring(tmp_path / "a.tar", tmp_path / "store")
    assert verdicts(outcomes) == ["imported"] * 4
    assert set(tree(history.store.path / first.relative_to(made))) == {*tree(first), *more}


def test_without_the_data_filter_no_archive_is_read(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(EnvironmentLacksError, match=r"Python 3\.11\.4 or later; unpack it with tar"):
        bring(archive, tmp_path / "store")


# Hostility


def add(opened: tarfile.TarFile, name: str, content: bytes = b"", **changes: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in changes.items():
        setattr(info, key, value)
    opened.addfile(info, io.BytesIO(content))


def header(opened: tarfile.TarFile, name: str, kind: bytes, size: int) -> None:
    """A header whose content does not follow."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    assert opened.fileobj is not None
    opened.fileobj.write(info.tobuf(tarfile.GNU_FORMAT) + bytes(512))


Harm = Callable[[tarfile.TarFile], None]

HOSTILE: dict[str, Harm] = {
    "symbolic link": lambda tar: add(tar, "run/plan.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": lambda tar: add(tar, "run/plan.json", type=tarfile.LNKTYPE, linkname="../../secret"),
    "parent": lambda tar: add(tar, "run/../../../escaped", b"x"),
    "absolute": lambda tar: add(tar, "/tmp/dlbench-escaped", b"x"),
    "device": lambda tar: add(tar, "run/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    "pipe": lambda tar: add(tar, "run/pipe", type=tarfile.FIFOTYPE),
    "sparse": lambda tar: add(tar, "run/plan.json", type=tarfile.GNUTYPE_SPARSE),
    "folder with content": lambda tar: add(tar, "run", b"x" * 600, type=tarfile.DIRTYPE),
    "huge": lambda tar: header(tar, "run/plan.json", tarfile.REGTYPE, 1 << 40),
    "negative": lambda tar: header(tar, "run/plan.json", tarfile.REGTYPE, -1),
    "huge name": lambda tar: header(tar, "././@LongLink", tarfile.GNUTYPE_LONGNAME, 1 << 40),
    "file as folder": lambda tar: (add(tar, "run/checkpoints", b"x"), add(tar, "run/checkpoints/y", b"x"))[0],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_end_it(made: Path, tmp_path: Path, name: str) -> None:
    """Nothing of such an archive comes in, whatever else lies in it."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as opened:
        opened.add(next((made / "runs").glob("*/*")), "runs/one")
        HOSTILE[name](opened)
    before = set(tmp_path.iterdir())
    history, outcomes = bring(path, tmp_path / "store")
    assert verdicts(outcomes) == ["damaged"]
    assert outcomes[0].why.isprintable()
    assert str(tmp_path / "store") not in outcomes[0].why
    assert history.entries() == []
    assert set(tmp_path.iterdir()) - before == {tmp_path / "store"}
    assert set(tree(tmp_path / "store")) <= {"history.json", "index.jsonl"}
    assert not Path("/tmp/dlbench-escaped").exists()


@pytest.mark.parametrize("name", ["a\nb", "\u202egnp.exe", "a\\b"])
def test_a_run_with_an_odd_name_in_it_stays_out(made: Path, tmp_path: Path, name: str) -> None:
    first, second = sorted((made / "runs").glob("*/*"))[:2]
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as opened:
        opened.add(first, "runs/first")
        opened.add(second, "runs/second")
        add(opened, f"runs/first/{name}", b"x")
    history, outcomes = bring(tmp_path / "a.tar", tmp_path / "store")
    assert sorted(verdicts(outcomes)) == ["damaged", "imported"]
    assert all(outcome.why.isprintable() for outcome in outcomes)
    assert [entry.run_id for entry in history.entries()] == [second.name]


def test_the_pax_format_is_refused_with_a_remedy(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as opened:
        opened.add(made / "runs", "runs")
    assert "--format=gnu" in bring(path, tmp_path / "store")[1][0].why


@pytest.mark.parametrize(
    ("limits", "words"),
    [(ArchiveLimits(members=5), "more than 5 members"), (ArchiveLimits(total_bytes=1000), "or 1000 B")],
)
def test_limits(made: Path, tmp_path: Path, limits: ArchiveLimits, words: str) -> None:
    path = repacked(made / "runs", tmp_path / "a.tar")
    history, outcomes = bring(path, tmp_path / "store", limits)
    assert [(one.verdict, words in one.why) for one in outcomes] == [("damaged", True)]
    assert history.entries() == []


def test_a_bomb_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as opened:
        add(opened, "run/plan.json", bytes(20_000_000))
    assert path.stat().st_size < 50_000
    _, outcomes = bring(path, tmp_path / "store", ArchiveLimits(unfolding_from=1_000_000))
    assert "unpacks" in outcomes[0].why
