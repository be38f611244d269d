"""`dlbench comm import`: tables as nccl-tests and OSU's micro-benchmarks print them, in several versions, become costs.
Times are those of planted costs, rounded as the programs round them, so that the costs are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlbench.cli import cli
from dlbench.comm.imports import ImportOptions, import_tables
from dlbench.comm.predictions import PredictionRequest, predict_all
from dlbench.comm.tables import read_output
from dlbench.errors import UserError
from dlbench.perfmodels.predictions import bus_factor, predict
from dlbench.perfmodels.schedules import Layout
from dlbench.records.comm import read_network
from dlbench.specs.comm import Collective
from tests.support import collectives_factory as factory

PLANTED = factory.network(inside=(10e-6, 1e-11), across=(20e-6, 1e-10))
SIZES = tuple(1 << power for power in range(10, 28, 3))
PROGRAMS: dict[Collective, str] = {
    "allreduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
}


def seconds(collective: Collective, size: int, ranks: int, group: int, algorithm: str = "ring") -> float:
    return predict(collective, algorithm, size, Layout(ranks=ranks, group_size=group), PLANTED)


def nccl(
    ranks: int,
    hosts: int,
    *,
    version: int = 2,
    collective: Collective = "allreduce",
    algorithm: str = "ring",
    named: bool = True,
) -> str:
    """Version 0: columns `error`, no devices' groups, no root; 1: `#wrong`; 2: says its version and what it runs."""
    name = PROGRAMS[collective]
    lines = ["# nccl-tests version 2.17.6 nccl-headers=22703", f"# Collective test starting: {name}_perf"][
        : version // 2 * 2
    ]
    lines += [f"$ mpirun -np {ranks} ./build/{name}_perf -b 1K -e 64M -f 4"] if named and version < 2 else []
    lines += ["# nThread 1 nGpus 1 minBytes 1024 maxBytes 67108864 step: 4(factor) warmup iters: 5 iters: 20", "#"]
    lines.append("# Using devices")
    for rank in range(ranks):
        group = "" if version == 0 else "Group  0 "
        host = f"node{rank * hosts // ranks:04}"
        lines.append(f"#  Rank {rank:2} {group}Pid {4000 + rank:6} on {host:>10} device  0 [0x18] NVIDIA A100")
    told = "redop" if collective != "all-gather" else ""
    columns = ["type", told] if version == 0 else ["type", "redop", "root"]
    last, good = ("error", "0e+00") if version == 0 else ("#wrong", "0")
    heads = f"{'time':>7} {'algbw':>7} {'busbw':>7} {last:>6}"
    lines += [
        "#",
        "#" + " " * 62 + "out-of-place                       in-place",
        f"#       size         count  {' '.join(f'{one:>7}' for one in columns)}  {heads}  {heads}",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    for size in SIZES:
        took = seconds(collective, size, ranks, ranks // hosts, algorithm)
        rate = size / took / 1e9
        cells, slow = (
            f"{1e6 * took * by:8.2f} {rate / by:7.2f} {rate / by * bus_factor(collective, ranks):7.2f} {good:>6}"
            for by in (1, 2)
        )
        kind = ["float", "sum" if told else ""] if version == 0 else ["float", "sum" if told else "none", "-1"]
        lines.append(f"{size:12} {size // 4:13} {' '.join(f'{one:>7}' for one in kind)}  {slow}  {cells}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 5.21", "#"]
    return "\n".join([*lines, *[f"# Collective test concluded: {name}_perf"][: version // 2]]) + "\n"


def osu(
    title: str, rows: list[tuple[int, float]], *, version: str = "v7.3", full: bool = False, unit: str = "us"
) -> str:
    head = "Bandwidth (MB/s)" if unit == "MB/s" else "Latency (us)" if version == "v3.1.1" else f"Avg Latency({unit})"
    lines = ["", f"# OSU MPI {title} Test {version}", *["# Datatype: MPI_CHAR."] * (version > "v7")]
    lines.append(f"# Size       {head}" + "   Min Latency(us)   Max Latency(us)  Iterations" * full)
    lines += [
        f"{size:<12} {value:17.2f}" + f" {value / 2:17.2f} {value * 2:17.2f} {1000:11}" * full for size, value in rows
    ]
    return "\n".join(lines) + "\n"


def osu_collective(
    title: str, collective: Collective, ranks: int, group: int, *, each: bool = False, full: bool = False
) -> str:
    """`each`: sizes are of what a rank sends to another."""
    sizes = [size // ranks if each else size for size in SIZES]
    return osu(
        title,
        [(one, 1e6 * seconds(collective, size, ranks, group)) for one, size in zip(sizes, SIZES, strict=True)],
        full=full,
    )


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("collective", list(PROGRAMS))
def test_tables_of_nccl_tests_are_read_in_every_version(
    version: int, collective: Collective, file: Callable[[str], Path]
) -> None:
    out_of_place, in_place = read_output(file(nccl(8, 2, version=version, collective=collective))).series
    for series, slow in ((out_of_place, 2), (in_place, 1)):
        assert (series.measures, series.ranks, series.nodes, series.dtype) == (collective, 8, 2, "float")
        assert list(series.seconds) == list(SIZES)
        for size, times in series.seconds.items():
            assert times == pytest.approx([slow * seconds(collective, size, 8, 4)], abs=6e-9)


@pytest.mark.parametrize(
    ("program", "collective", "unchecked", "slow", "left_out"),
    [
        ("all_gather", "all-gather", "", 1, "out of place: in place is taken, as training calls it"),
        ("all_gather", "all-gather", "both", 1, "out of place: in place is taken, as training calls it"),
        ("alltoall", "all-to-all", "in place", 2, "in place: all-to-all has no checked form in place"),
        ("alltoall", "all-to-all", "both", 2, "in place: all-to-all has no checked form in place"),
    ],
)
def test_in_place_is_taken_where_the_collective_has_such_a_form(
    program: str, collective: str, unchecked: str, slow: int, left_out: str, file: Callable[[str], Path]
) -> None:
    """The test's times out of place are twice those in place; `-c 0` and all-to-all in place print N/A."""
    text = nccl(8, 2, collective="all-gather").replace("all_gather", program)
    text = text.replace("0\n", "N/A\n") if unchecked else text
    text = text.replace("     0 ", "   N/A ") if unchecked == "both" else text
    found = import_tables([file(text)], system="x", fitted="now", options=ImportOptions())
    assert found.network.collectives[0].time(SIZES[-1]) == pytest.approx(
        slow * seconds("all-gather", SIZES[-1], 8, 4), rel=0.02
    )
    assert found.left_out == (f"0.txt: line 16: {left_out}",)
    assert f"left out: {found.left_out[0]}" in found.network.sources
    assert any(f"nccl-tests {collective}, 8 ranks, fp32" in source for source in found.network.sources)


def test_several_rank_counts_of_a_library_give_lines_and_the_costs_behind_them(file: Callable[[str], Path]) -> None:
    paths = [file(nccl(ranks, hosts)) for ranks, hosts in ((4, 1), (8, 2), (16, 4))]
    network = import_tables(paths, system="dgx", fitted="now", options=ImportOptions()).network
    assert [(line.name, line.ranks, line.sizes) for line in network.collectives] == [
        ("nccl flat", ranks, (SIZES[0], SIZES[-1])) for ranks in (4, 8, 16)
    ]
    assert network.transport == "torch-nccl"
    for found, planted in ((network.inside, PLANTED.inside), (network.across, PLANTED.across)):
        assert found.pieces[0].alpha_s == pytest.approx(planted.pieces[0].alpha_s, rel=0.05)
        assert found.pieces[0].beta_s_per_byte == pytest.approx(planted.pieces[0].beta_s_per_byte, rel=0.05)
    assert sum("costs as of ring" in source for source in network.sources) == 3
    request = PredictionRequest(sizes=(SIZES[-1],), group_size=4, algorithms=("ring",))
    (far,) = predict_all(network, (32,), request).predictions
    assert far.series[0].seconds[0] == pytest.approx(seconds("allreduce", SIZES[-1], 32, 4), rel=0.05)
    assert far.model_error > 1


def test_the_algorithm_that_explains_the_times_is_found(file: Callable[[str], Path]) -> None:
    paths = [file(nccl(ranks, ranks, algorithm="recursive-halving-doubling")) for ranks in (4, 8, 16)]
    network = import_tables(paths, system="dgx", fitted="now", options=ImportOptions()).network
    assert {one.algorithm for one in network.errors} == {"recursive-halving-doubling"}
    assert network.across.pieces[0].alpha_s == pytest.approx(20e-6, rel=0.05)


def test_repeats_of_a_layout_give_intervals(file: Callable[[str], Path]) -> None:
    outputs = [nccl(ranks, 1) for ranks in (4, 8)]
    repeats = [
        text.replace("563.32", f"563.3{one}").replace("727.20", f"727.2{one}") for text in outputs for one in range(3)
    ]
    paths = [file(text) for text in repeats]
    network = import_tables(paths, system="dgx", fitted="now", options=ImportOptions()).network
    assert len(network.draws) == 200
    assert network.fitted_over.runs == 3


@pytest.mark.parametrize(
    ("title", "collective", "each"),
    [
        ("Allreduce Latency", "allreduce", False),
        ("Allgather Latency", "all-gather", True),
        ("Reduce_scatter Latency", "reduce-scatter", False),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_collectives_of_osu_are_sized_by_the_whole_buffer(
    title: str, collective: Collective, each: bool, full: bool, file: Callable[[str], Path]
) -> None:
    path = file(osu_collective(title, collective, 8, 4, each=each, full=full))
    network = import_tables([path], system="big", fitted="now", options=ImportOptions(ranks=[8], group_size=4)).network
    (line,) = network.collectives
    assert line.name == ("mpi flat" if collective == "allreduce" else f"mpi {collective} library")
    assert line.sizes == (SIZES[0], SIZES[-1])
    assert line.time(SIZES[-1]) == pytest.approx(seconds(collective, SIZES[-1], 8, 4), rel=0.05)
    assert network.levels == {}  # One rank count shows no costs of messages.


@pytest.mark.parametrize("version", ["v3.1.1", "v5.9", "v7.3"])
def test_latency_and_bandwidth_are_costs_of_a_level(version: str, file: Callable[[str], Path]) -> None:
    sizes = [0, *SIZES]
    paths = [
        file(osu("Latency", [(size, 1e6 * (alpha + size * beta)) for size in sizes], version=version))
        for alpha, beta in ((2e-6, 1e-10), (5e-6, 4e-10), (8e-6, 8e-10))
    ]
    paths.append(
        file(osu("Bandwidth", [(size, 3000 * size / (size + 4096)) for size in SIZES], version=version, unit="MB/s"))
    )
    levels = ["inside", "across", "beyond", "across"]
    network = import_tables(paths, system="big", fitted="now", options=ImportOptions(levels=levels)).network
    found = {name: level.pieces[-1] for name, level in network.levels.items()}
    assert [one.alpha_s for one in found.values()] == pytest.approx([2e-6, 5e-6, 8e-6], rel=0.02)
    assert [one.beta_s_per_byte for one in found.values()] == pytest.approx([1e-10, 1 / 3e9, 8e-10], rel=0.01)


NCCL, OSU = nccl(8, 2), osu_collective("Allreduce Latency", "allreduce", 8, 4)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (NCCL[: NCCL.index("\n# Out") - 20], {}, r"line 23: 1[01] of 13 columns .*, or the file is cut off"),
        (NCCL.partition("# Out of")[0], {}, "line 23: the table has no end"),
        (NCCL.replace("0\n# Out", "3\n# Out"), {}, r"line 23: .* 3 wrong values at 33554432 B, in place \(#wrong\)"),
        (NCCL.replace("0 OK", "7 FAILED"), {}, r"line 24: .* wrong values in this table \(Out .* 7 FAILED\)"),
        (NCCL.replace("Rank  1", "Rank  0"), {}, "line 7: rank 0 again: each process measured alone"),
        (NCCL.replace("node0001", "node0002", 1), {}, r"8 ranks on 3 nodes: need"),
        (NCCL.replace("all_reduce", "sendrecv"), {}, "line 16: nccl-tests sendrecv gives no costs; costs come from"),
        (nccl(8, 2, version=1, named=False), {}, r"0\.txt: line 14: does not contain its collective; give --coll"),
        (nccl(8, 2, version=1, named=False), {"collective": "all-gather"}, "busbw is 1.75 x algbw; all-gather over 8"),
        (NCCL, {"ranks": [8]}, "--ranks: none of these outputs needs it"),
        (NCCL, {"dtype": "int8"}, "line 16: allreduce was measured with float; choose one by --type, e.g. --type fl"),
        (OSU, {"group_size": 4}, "line 4: does not contain its ranks; give --ranks once"),
        (OSU, {"ranks": [8]}, "does not contain its group-size; give --group-size once"),
        (OSU, {"ranks": [8], "group_size": 3}, "8 ranks on nodes of 3: need"),
        (OSU.replace("(us)", "(ms)"), {}, r"line 4: 'Size       Avg Latency\(ms\)': the second column must be in us"),
        (OSU.replace("Allreduce", "Barrier"), {}, "line 2: OSU MPI Barrier Latency gives no costs;"),
        (OSU + "67108864   -3.0\n", {}, "line 11: 67108864 B, -3: times must be above 0"),
        (OSU + "67108864   [warn]\n", {}, "line 11: 2 of 2 columns: other text interrupts the row"),
        (OSU + "2097152   3.0\n", {}, "line 11: 2097152 B after 33554432 B: not a row of this table"),
        (OSU.replace("(us)", "(us)  Validation").replace("\n1024  ", "\n1024 0.5 Fail"), {}, "line 5: OSU's valid"),
        (NCCL.replace("  time ", "cputime"), {}, r"line 16: column cputime is .* \(nccl-tests -C 1\)"),
        (NCCL.replace("Rank  7 Group  0", "Rank  7 Group  1"), {}, "8 ranks are split into 2 groups"),
        (NCCL.replace("-1  ", "-1 gpu001:1:2 [0] NCCL INFO", 1), {}, "line 19: 5 of 13 columns in the row of 1024 B"),
        (osu("Put", []).replace("MPI Put", "MPI_Put Latency"), {}, r"OSU MPI_Put Latency \(one-sided\) gives no costs"),
        (OSU + OSU.partition("CHAR.\n")[2], {"ranks": [8]}, "line 11: a second table without a title"),
        (OSU + f"{'9' * 400}   3.0\n", {}, "line 11: 9{20} B: a size must be from 0 to 9007199254740991"),
        (OSU + "2097152", {}, "line 11: 1 of 2 columns: .*, or the file is cut off"),
        (OSU.partition("1024")[0], {}, r"line 4: OSU Allreduce Latency v7\.3 has no row up to here"),
        ("hello\n", {}, "no table of nccl-tests or OSU in 1 lines"),
        (osu("Bandwidth", [(1, 2.0)], unit="MB/s"), {"levels": ["across"]}, "give osu_latency as well"),
        (osu("Latency", [(1, 2.0), (2, 2.1)]), {}, "does not contain its level; give --level"),
        (osu("Latency", [(1, 2.0), (2, 2.1)]), {"levels": ["beyond"]}, "--level beyond: .* give osu_latency of across"),
        (osu("Latency", [(1, 2.0)]), {"levels": ["across"]}, "line 4: fit: needs at least 3 points of at least"),
        (re.sub(r"\n ++(?!1024).*", "", NCCL), {}, "line 16: 1 size above 0; a line needs two sizes or more"),
        (NCCL + NCCL, {}, "line 43: is a copy of .*: line 16; a repeat"),
        (NCCL + OSU, {"ranks": [8], "group_size": 4}, "is of another library"),
    ],
    ids=range(36),
)
def test_what_is_wrong_is_said_with_its_line(
    text: str, options: dict[str, object], message: str, file: Callable[[str], Path]
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        import_tables([file(text)], system="x", fitted="now", options=ImportOptions(**options))
    assert "\n" not in str(raised.value)


def rows_as(text: str, before: str, after: str) -> str:
    """The rows of a table of nccl-tests with another type, operation or root."""
    rows = [row for row in text.splitlines(keepends=True) if row.startswith("    ")]
    return "".join(row.replace(before, after) for row in rows)


def below(text: str, rows: str) -> str:
    return text.replace("# Out of", rows + "# Out of")


@pytest.mark.parametrize(
    ("text", "option", "told", "label", "left_out"),
    [
        (below(NCCL, rows_as(NCCL, "  float", "   half")), "--type", "float, half", "half", "float (--type half)"),
        (below(NCCL, rows_as(NCCL, "    sum", " mulsum")), "--op", "sum, mulsum", "sum", "mulsum (--op sum)"),
        (
            OSU + OSU.partition("\n# ")[2].partition("\n")[2].replace("CHAR", "INT"),
            "--type",
            "MPI_CHAR, MPI_INT",
            "MPI_INT",
            "MPI_CHAR (--type MPI_INT)",
        ),
    ],
    ids=range(3),
)
def test_of_several_types_or_operations_one_is_asked_for(
    text: str, option: str, told: str, label: str, left_out: str, file: Callable[[str], Path]
) -> None:
    unsaid = {"ranks": [8], "group_size": 4} if "OSU" in text else {}
    path = file(text)
    with pytest.raises(UserError, match=f"allreduce was measured with {told}; choose one by {option}"):
        import_tables([path], system="x", fitted="now", options=ImportOptions(**unsaid))
    asked = {"dtype" if option == "--type" else "op": label}
    found = import_tables([path], system="x", fitted="now", options=ImportOptions(**unsaid, **asked))
    assert found.dtype == {"half": "fp16", "sum": "fp32"}.get(label, label)
    assert any(left_out in text for text in found.left_out)
    assert found.network.collectives[0].time(SIZES[-1]) == pytest.approx(
        seconds("allreduce", SIZES[-1], 8, 4), rel=0.05
    )


def test_of_several_roots_the_lowest_is_taken(file: Callable[[str], Path]) -> None:
    text = nccl(8, 2, collective="all-gather").replace("all_gather", "gather").replace("none      -1", "none       2")
    path = file(below(text, rows_as(text, "none       2", "none      10")))
    found = import_tables([path], system="x", fitted="now", options=ImportOptions())
    assert found.left_out[0] == "0.txt: line 16: roots 10: the lowest, 2, is taken"
    assert "cycles" not in found.network.sources[0]


def test_cycles_are_repeats(file: Callable[[str], Path]) -> None:
    outputs = [nccl(ranks, 1) for ranks in (4, 8)]
    paths = [file(below(text, rows_as(text, "", "") * 2)) for text in outputs]
    network = import_tables(paths, system="dgx", fitted="now", options=ImportOptions()).network
    assert (network.fitted_over.runs, len(network.draws)) == (3, 200)
    assert "3 cycles" in network.sources[0]


TORN = "gpu001:21:22 [0] NCCL INFO AllReduce: opCount 5 datatype 7\n8h200-2:21:22 [0] NCCL INFO Algo 0 time 25.87\n"


@pytest.mark.parametrize(
    "text",
    [
        NCCL.replace("     -1  ", f"     -1 {TORN}"),
        NCCL.replace("      0  ", f"      0 {TORN}", 2),
        *(
            "".join(f"{prefix}{line}\n" for line in NCCL.splitlines())
            for prefix in ("[1,0]<stdout>:", "0: ", "host 0: ", "nccl-test-launcher-7x9k2 ", "2025-03-11T14:05:09.5Z ")
        ),
        f"0: {TORN}[2025-03-11 14:05:09] 4 tasks of gpu001\n"
        + NCCL
        + "1741701909\n2025-03-11 14:06:09 job 4711 ends\n",
        NCCL.replace("#wrong\n", "#wrong timestamp\n").replace("0\n  ", "0  2025-03-11 14:05:09\n  "),
    ],
    ids=range(9),
)
def test_text_around_and_inside_a_table_is_known_for_what_it_is(text: str, file: Callable[[str], Path]) -> None:
    _, whole = read_output(file(NCCL)).series
    _, series = read_output(file(text)).series
    assert (series.seconds, series.ranks, series.nodes) == (whole.seconds, 8, 2)


def test_a_log_of_several_programs_gives_costs_of_those_that_have_some(file: Callable[[str], Path]) -> None:
    latency = osu("Latency", [(size, 2 + size * 1e-4) for size in SIZES])
    others = ("_Put Latency", " Bi-Directional Bandwidth", " Non-blocking Allreduce Latency")
    log = "".join(latency.replace(" Latency Test", f"{name} Test").replace("2.1", "9.1") for name in others)
    path = file(f"srun: job 7\n{log}{latency}{log}\nreal 0m1.2s\n1741701909\n2025-03-11 14:06:09\nsrun: 4 tasks end\n")
    found = import_tables([path], system="x", fitted="now", options=ImportOptions(levels=["across"]))
    assert found.network.across.pieces[0].alpha_s == pytest.approx(2e-6, rel=0.02)
    assert len(found.left_out) == 6
    assert found.left_out[0] == "0.txt: line 3: OSU MPI_Put Latency (one-sided) gives no costs"


def report_of(text: str, *, devices: int = 8, gpus: int = 1) -> dict[str, object]:
    """What `-J` writes of a run, by its table: of each process only the first GPU is listed."""
    results = []
    for row in rows_as(text, "", "").splitlines():
        size, count, kind, op, root, *figures = row.split()
        sides = [
            dict(zip(("time", "alg_bw", "bus_bw", "nwrong"), map(float, figures[start : start + 4]), strict=True))
            for start in (0, 4)
        ]
        result = {"size": int(size), "count": int(count), "type": kind, "redop": op, "root": f"    {root}"}
        results.append(result | {"out_of_place": sides[0], "in_place": sides[1]})
    hosts = [{"rank": rank * gpus, "group": 0, "hostname": f"n{2 * rank // devices}"} for rank in range(devices)]
    return {
        "version": 3,
        "args": ["./build/all_reduce_perf", "-J", "out.json"],
        "config": {"nthreads": 1, "ngpus": gpus, "devices": hosts},
        "results": results,
        "average_bus_bandwidth": {"bandwidth": 17.2},
    }


@pytest.mark.parametrize(("devices", "gpus"), [(8, 1), (2, 4)])
def test_the_json_of_nccl_tests_is_read_like_its_table(devices: int, gpus: int, file: Callable[[str], Path]) -> None:
    path = file(json.dumps(report_of(NCCL, devices=devices, gpus=gpus)))
    _, table = read_output(file(NCCL)).series
    _, series = read_output(path).series
    assert (series.seconds, series.ranks, series.nodes) == (table.seconds, 8, 2)
    assert import_tables([path], system="x", fitted="now", options=ImportOptions()).network.collectives[0].ranks == 8


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"average_bus', '"other', "the run did not end"),
        ('"time"', '"cpu_time"', "cpu_time is the time of the host's calls"),
        ('"size": 1024', '"size": 1e999', "is not JSON of nccl-tests .*: cannot convert float infinity"),
        ('"config"', '"configuration"', "is not JSON of nccl-tests .*: 'config'"),
        ('"results": [{', '"results": [{{', "line 1"),
    ],
)
def test_a_json_without_figures_is_refused(before: str, after: str, message: str, file: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=message):
        read_output(file(json.dumps(report_of(NCCL)).replace(before, after)))


def test_a_time_in_another_unit_is_noticed_by_its_rate(file: Callable[[str], Path]) -> None:
    lines = NCCL.splitlines()
    words = lines[-5].split()
    lines[-5] = " ".join([*words[:9], str(float(words[9]) / 1e3), *words[10:]])
    with pytest.raises(UserError, match=r"are not .* GB/s: time must be in us"):
        read_output(file("\n".join(lines)))


def test_the_command_writes_a_file_that_predict_reads(file: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "dgx.network.json"
    words = ["comm", "import", str(file(nccl(4, 1))), str(file(nccl(8, 2))), "--system", "dgx", "-o", str(out)]
    found = CliRunner().invoke(cli, words)
    assert found.exit_code == 0, found.output
    assert "Fitted costs of dgx, torch-nccl" in found.stdout
    network = read_network(out)
    assert network.system == "dgx"
    (told,) = predict_all(network, (8,), PredictionRequest(sizes=SIZES, group_size=4)).predictions
    assert "nccl flat" in [series.name for series in told.series]
    wrong = CliRunner().invoke(cli, [*words, "--group-size", "0"])
    assert str(wrong.exception) == "--group-size 0: must be 1 or more"
