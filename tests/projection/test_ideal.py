"""A training by data sheet alone: it says that it is ideal, in every format, and holds nothing that was measured."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.errors import UserError
from dlbench.perfmodels.predictions import predict
from dlbench.projection.ideal import ideal_rows
from dlbench.projection.spec_machine import layout_of, network_of
from dlbench.specs.choices import WorkloadFile, choose, choose_system_with_origins
from dlbench.specs.files import find
from dlbench.specs.system import SystemSpec
from dlbench.specs.workload import Workload

P40 = "project spec resnet50 --preset full --system p40-roce --to"


def system_of(name: str) -> SystemSpec:
    return choose_system_with_origins(name, {})[0]


def workload_of(name: str, preset: str = "full") -> Workload:
    return choose(WorkloadFile(find("workloads", name)), preset, {}).workload()


def run(text: str, *more: str) -> Result:
    return CliRunner().invoke(cli, [*text.split(), *more])


def test_computing_is_operations_at_the_peak_and_the_exchange_a_ring_over_stated_links() -> None:
    workload, system = workload_of("resnet50"), system_of("p40-roce")
    (row,) = ideal_rows(workload, system, layout_of(system, 64), batch=64 * 64, strategies=("data",))
    least = 64 * workload.model.training_flops(workload.data) / 12e12
    assert least < row.compute_s < 1.5 * least  # the rest is bytes of layers that compute little
    weights = 4 * sum(layer.weights for layer in workload.model.layer_table(workload.data))
    ring = predict("allreduce", "ring", weights // 4 * 4, layout_of(system, 64), network_of(system))
    assert ring <= row.communication_s < 1.3 * ring  # more start-ups: it goes in buckets
    assert row.step_s == pytest.approx(row.compute_s + row.exposed_s)
    assert (row.fits, row.is_ideal, row.measured_s) == (True, True, None)


def test_flows_share_the_adapters_that_are_stated() -> None:
    bert, system = workload_of("bert"), system_of("abci")
    rows = ideal_rows(bert, system, layout_of(system, 64), batch=64, strategies=("data+tensor",))
    # Each of the four places in a node has an all-reduce of its own, over the node's two adapters.
    assert {row.phi for row in rows if row.replicas == 16} == {2}


def test_an_ideal_all_reduce_uses_all_links_of_a_node_and_its_leaf() -> None:
    """A ring has one flow out of a node, so that a second adapter would do nothing for it."""
    workload, system = workload_of("resnet50"), system_of("abci")
    assert system.network is not None
    assert system.network.across is not None
    sent = []
    for links, taper in ((1, 1.0), (2, 1.0), (4, 1.0), (4, 30.0)):
        across = system.network.across.model_copy(update={"links": links})
        changed = {"across": across, "beyond": None, "nodes_per_leaf": 4, "leaf_taper": taper}
        other = system.model_copy(update={"network": system.network.model_copy(update=changed)})
        (row,) = ideal_rows(workload, other, layout_of(other, 64), batch=64 * 64, strategies=("data",))
        sent.append(row.communication_s)
    assert sent[0] > 1.05 * sent[1] > 1.05 * sent[2]
    assert sent[3] > 1.05 * sent[2]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--strategy tensor", "no strategy fits: it has no attention heads."),
        ("--memory-limit 1MiB", "no strategy fits: data needs the least memory, 11.42 GiB."),
    ],
)
def test_counts_where_nothing_fits_are_named_and_end_with_4(more: str, why: str) -> None:
    done = run(f"{P40} 8,16 {more}")
    assert done.exit_code == 4
    for ranks in (8, 16):
        assert f"{ranks} ranks: {why}" in done.output
    # Pipelines of the network end at 18 blocks; others are said all the same.
    some = run(f"{P40} 8,64 --strategy pipeline")
    assert some.exit_code == 0
    assert "8 ranks, data+pipeline" in some.output


@pytest.mark.parametrize("form", ["text", "json", "csv", "md"])
def test_the_command_says_that_it_is_ideal_in_every_format(form: str) -> None:
    done = run(f"{P40} 8,64,2048 --format {form}")
    assert done.exit_code == 0, done.output
    assert "deal" in done.output
    if form == "text":
        assert "Modelled by data sheet, not measured." in done.output
        assert "2,048 ranks, data: " in " ".join(done.output.split())
        assert len(done.output.splitlines()) < 45
    if form == "json":
        content = json.loads(done.output)
        assert (content["format"], content["system"]) == ("dlbench.ideal-projection", "p40-roce")
        assert content["global_batch"] == {"8": 512, "64": 4096, "2048": 131072}
        assert all(one["is_ideal"] and one["measured_s"] is None for one in content["rows"])


def test_settings_replace_those_of_the_preset() -> None:
    large = "project spec bert --preset 1.3b --system abci --to 64 --strategy all --format json"
    more = ("--set", "model.num_layers=4", "--set", "data.sequence_length=512", "--set", "train.batch_per_rank=2")
    content, changed = (json.loads(run(large, *words).output) for words in ((), more))
    assert (content["overrides"], content["global_batch"]) == ({}, {"64": 256})
    assert changed["overrides"] == {
        "model.num_layers": 4,
        "data.sequence_length": 512,
        "train.batch_per_rank": 2,
    }
    assert changed["global_batch"] == {"64": 128}
    data, less = (next(row for row in one["rows"] if row["strategy"] == "data") for one in (content, changed))
    assert less["compute_s"] < data["compute_s"] / 20
    # Groups of four neighbours share a layer; of the stages' counts the best is shown.
    rows = [row for row in changed["rows"] if row["strategy"] == "data+pipeline+tensor"]
    assert {row["tensor_ranks"] for row in rows} == {2, 4}
    text = run(large.replace("json", "text"), *more).output
    assert text.count("data+pipeline+tensor ") == 1
    assert "layers=4" in run(large.replace("json", "md"), *more).output


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (f"{P40} 12", "--to 12: does not fill nodes of 8 ranks"),
        ("project spec resnet50 --to 8", "Missing option '--system'"),
        ("project spec --system abci --to 8", "Missing argument 'WORKLOAD'"),
        (f"{P40} 8 --record", "No such option '--record'"),
        (f"{P40} 8 --set train.batch_per_rnk=3", "--set: train.batch_per_rnk: unknown key; did you mean train.batch_"),
        (f"{P40} 8 --set train.batch_per_rank=0", "--set: train.batch_per_rank: must be a whole number of 1 or more"),
        (f"{P40} 8 --set train.seed=3", "--set train.seed: has no effect on a projection by data sheet, which reads "),
        (f"{P40} 8 --set train.batch_per_rank", "must be key=value"),
    ],
)
def test_what_a_data_sheet_cannot_say_is_refused_in_a_line(command: str, why: str) -> None:
    done = run(command)
    assert done.exit_code != 0
    assert why in (str(done.exception) if isinstance(done.exception, UserError) else done.output)
