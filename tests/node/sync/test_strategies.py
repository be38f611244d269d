"""Sharded, tensor-parallel and local training, by two ranks that are started once and train every strategy in turn."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dlbench.analysis.causes import causes_of
from dlbench.jobs.scripts.launch import local_environments, resolve
from dlbench.node import __main__ as node
from dlbench.node.models.build import build_model
from dlbench.node.ranks import detect
from dlbench.node.sync.build_engine import build_engine
from dlbench.node.training import loop
from dlbench.node.training.checkpoint import Checkpoint, give_shares, snapshot
from dlbench.node.training.phases import timer_for
from dlbench.node.training.run import Rank
from dlbench.records.folder import RunFolder, create, prepare_output
from dlbench.records.record import Record
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from dlbench.specs.plan import RunPlan
from tests.support.datasets import write_volumes
from tests.support.forked_runs import mean_losses, planned, run_forked
from tests.support.forks import run_ranks
from tests.support.one_rank import context_of

SHORT = ("--ranks", "2", "--repeats", "1", "--preset", "ci", "--set", "watch.sampler=false")
ALIKE = (*SHORT, "--set", "measure.warmup_steps=3")
TRAINED = {"measure.measured_steps": 2, "train.gradient_accumulation": 2, "checkpoint.every_steps": 5}
PIPELINE = ("--engine", "pipeline")
STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": ("--engine", "ddp"),
    # --- FSDP
    "fsdp": ("--engine", "fsdp"),
    "fsdp-gradients": ("--engine", "fsdp", "--set", "engine.fsdp.shard=gradients"),
    # --- ZeRO-1
    "zero-1": ("--engine", "ddp", "--set", "engine.ddp.shard_optimizer=true"),
    # --- tensor parallel
    "tensor": ("--engine", "fsdp", "--set", "engine.fsdp.tensor_ranks=2"),
    # --- pipeline
    "gpipe": (*PIPELINE, "--set", "engine.pipeline.schedule=gpipe", "--set", "engine.pipeline.microbatches=2"),
    "1f1b": PIPELINE,
    # --- local SGD: behind the others, as each goes on from the one before it
    "local": ("--engine", "ddp", "--set", "sync.average_every=2"),
    "post-local": ("--engine", "ddp", "--set", "sync.average_every=2", "--set", "sync.average_from=2"),
}
"""What `dlbench run bert` is asked for, besides what all are; BERT has LAMB and clips."""
READERS = ("ddp", "fsdp", "zero-1", "tensor", "1f1b", "local")  # Those left out load state as fsdp, 1f1b and local do.

TO_QUALITY = (
    *(*SHORT, "--to-accuracy", "--set", "train.batch_per_rank=5"),
    *("--set", "quality.target=0.0001", "--set", "quality.max_epochs=2.0"),
    *("--set", "quality.evaluate_every_epochs=0.5", "--set", "model.dropout=0.0"),
)
OF_TEXT = (
    *(*SHORT, "--to-accuracy", "--set", "quality.target=0.9"),
    *("--set", "quality.max_samples=128", "--set", "quality.evaluate_every_samples=64"),
    *("--set", "quality.evaluate_samples=37", "--set", "train.batch_per_rank=4"),
)
LAST = 5  # The step after which each writes the checkpoint that others go on from.


def plan_of(name: str, out: Path, **more: object) -> RunPlan:
    """Of a strategy. `more`: settings besides `TRAINED`, with two underscores for each point."""
    settings = TRAINED | {key.replace("__", "."): value for key, value in more.items()}
    if STRATEGIES[name][:2] == PIPELINE:
        del settings["train.gradient_accumulation"]  # microbatches take its place
    shared = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    (plan,), _ = planned("bert", *ALIKE, *shared, *STRATEGIES[name], "--out", out)
    return plan


def every_plan(arguments: list[str]) -> int:
    """One rank: trains plan after plan in this process (TRAIN PLAN), as well with dropout that each rank draws for
    itself (DRIFT PLAN), or reads checkpoints (READ PLAN FILE ...).
    """
    for line in arguments:
        what, path, *files = line.split()
        if what == "DRIFT":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "_step_seed", lambda seed, replica, step: os.getpid() + step)
                node.main([path])
            continue
        if code := node.main([path]) if what == "TRAIN" else read_each(Path(path), [Path(file) for file in files]):
            return code
    return 0


def read_each(path: Path, files: list[Path]) -> int:
    """Prepares the plan as a run does and goes on from one file after the other; rank 0 notes beside the plan which
    tensors of each file the engine then gives back otherwise.
    """
    plan = node.load_plan(path)
    assert isinstance(plan, RunPlan)
    place, device = detect(plan), torch.device("cpu")
    engine = build_engine(plan, RunFolder(path.parent), place, device, None)
    engine.start()
    context = context_of(plan, engine=engine, place=place)
    state = Rank(context, timer_for(device, synchronise=False)).prepare(str(files[0]))
    differing = []
    for file in files:
        read = Checkpoint.on_all_ranks(
            file, rank=place.rank, gather=engine.gather, broadcast=engine.broadcast, device=device, beat=context.beat
        )
        read.restore(state.model, state.optimizer, engine)
        whole = engine.whole_state(state.model, state.optimizer)
        if place.rank == 0:
            held, tensors = load_file(file), snapshot(whole, read.progress, {}).tensors
            differing.append(sorted(name for name in held.keys() | tensors if not same(held, tensors, name)))
        else:
            give_shares(whole, context.beat)
    state.close()
    if place.rank == 0:
        path.with_name("differing.json").write_text(json.dumps(differing), encoding="utf-8")
    engine.barrier()
    engine.stop()
    return 0


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], name: str) -> bool:
    return name in one and name in other and torch.equal(one[name], other[name])


def write_text(folder: Path) -> None:
    words = np.random.default_rng(0).choice(["apple", "river", "stone"], (120, 70))
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
        (folder / split / "corpus.txt").write_text("\n\n".join(" ".join(line) + "." for line in words) + "\n")


@dataclass(frozen=True, kw_only=True)
class Everything:
    runs: Mapping[str, Run]  # By strategy; each trained LAST steps.
    resumed: Mapping[str, Run]  # Two steps more, each from the checkpoint of the strategy before it in READERS.
    differing: Mapping[str, list[list[str]]]
    """By strategy that read: for the checkpoint of each strategy, the tensors that it did not give back bit for bit."""
    evaluated: Mapping[str, Run]  # By engine: CosmoFlow to a quality, rank 0 with a batch more than rank 1.
    sharing: Mapping[str, Run]
    """With dropout by strategy, that of tensor parallel also drawn apart by ranks (DRIFT); of text to a quality; and
    with rank 0 late by its batches (late NAME).
    """


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    """Valid runs of every strategy, and what each reads of each other's checkpoint, by two ranks that start once."""
    folder = tmp_path_factory.mktemp("strategies")
    roots = [prepare_output(folder / name) for name in ("runs", "resumed", "read", "quality", "sharing")]
    plans = {name: plan_of(name, roots[0]) for name in STRATEGIES}
    folders = {name: create(roots[0], plan) for name, plan in plans.items()}
    files = {name: folder.checkpoint(LAST) for name, folder in folders.items()}
    again, before = {}, files[READERS[-1]]
    for name in READERS:
        plan = plan_of(name, roots[1], measure__measured_steps=4)
        kept = plan.checkpoint.model_copy(update={"resume_from": str(before)})  # it will be there
        again[name], before = plan.model_copy(update={"checkpoint": kept}), files[name]
    lines = [f"TRAIN {folder.plan}" for folder in folders.values()]
    lines += [f"TRAIN {create(roots[1], plan).plan}" for plan in again.values()]
    reading = {name: create(roots[2], plans[name]).plan for name in READERS}
    lines += [f"READ {path} {' '.join(map(str, files.values()))}" for path in reading.values()]
    write_volumes(folder / "density" / "train", 20, seed=0)
    write_volumes(folder / "density" / "validation", 11, seed=1)
    quality = {
        engine: planned("cosmoflow", *TO_QUALITY, "--engine", engine, "--data", folder / "density")[0][0]
        for engine in ("ddp", "fsdp")
    }
    lines += [f"TRAIN {create(roots[3], plan).plan}" for plan in quality.values()]
    dropping = {"ddp": "ddp", "fsdp": "fsdp", "tensor": "tensor", "1f1b": "1f1b", "DRIFT": "tensor"}
    sharing = {what: plan_of(name, roots[4], model__dropout=0.1) for what, name in dropping.items()}
    late = {"fault__input_delay_s": 0.4, "fault__ranks": 0}
    sharing |= {f"late {name}": plan_of(name, roots[4], **late) for name in ("fsdp", "tensor")}
    write_text(folder / "text")
    for name in ("tensor", "1f1b"):
        (sharing[f"text {name}"],) = planned("bert", *OF_TEXT, *STRATEGIES[name], "--data", folder / "text")[0]
    for what, plan in sharing.items():
        lines.append(f"{what if what == 'DRIFT' else 'TRAIN'} {create(roots[4], plan).plan}")
    environments = [resolve(one) for one in local_environments(plans["ddp"], secrets.token_hex(8))]
    codes, said = run_ranks(every_plan, lines, environments, folder)
    assert codes == [0, 0], "\n".join(text[-4000:] for text in said)
    found = [{run.plan.run_id: run for run in scan(root).runs} for root in roots]
    return Everything(
        runs={name: found[0][plan.run_id] for name, plan in plans.items()},
        resumed={name: found[1][plan.run_id] for name, plan in again.items()},
        differing={name: json.loads(path.with_name("differing.json").read_text()) for name, path in reading.items()},
        evaluated={name: found[3][plan.run_id] for name, plan in quality.items()},
        sharing={name: found[4][plan.run_id] for name, plan in sharing.items()},
    )


@pytest.fixture(scope="module")
def trained(everything: Everything) -> Mapping[str, Run]:
    """A valid run of every strategy."""
    return everything.runs


def record(run: Run) -> Record:
    assert run.record is not None
    return run.record


def alike(trained: Mapping[str, Run]) -> list[str]:
    """The strategies of the same mathematics as DDP."""
    return [name for name, run in trained.items() if run.plan.strategy != "local-sgd"]


def checkpoint_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder.checkpoint(LAST))


def test_each_checkpoint_is_read_bit_for_bit_under_every_strategy(everything: Everything) -> None:
    assert everything.differing == {name: [[]] * len(STRATEGIES) for name in READERS}


def test_training_goes_on_from_the_checkpoint_of_another_strategy(everything: Everything) -> None:
    resumed = everything.resumed
    assert {name: record(run).state for name, run in resumed.items()} == dict.fromkeys(READERS, "valid")
    ended = {name: record(everything.runs[name]).ranks[0].final_parameters_sha256 for name in READERS}
    before = [list(ended.values())[-1], *ended.values()][: len(ended)]
    assert [record(run).ranks[0].initial_parameters_sha256 for run in resumed.values()] == before
    same_start = alike(resumed)
    going_on = [name for name in same_start if READERS[READERS.index(name) - 1] in same_start]
    # Ranks that share a replica have the mean over both ranks' samples.
    losses = {name: fmean(rank.last_loss or nan for rank in record(resumed[name]).ranks) for name in going_on}
    for name, found in losses.items():
        assert found == pytest.approx(losses[going_on[0]], rel=1e-5), name


def test_ranks_with_unequal_numbers_of_batches_evaluate_sharded_parameters(everything: Everything) -> None:
    seen = {name: record(run).quality for name, run in everything.evaluated.items()}
    values = {name: [each.value for each in quality.evaluations] for name, quality in seen.items() if quality}
    assert len(values["ddp"]) == 4
    assert values["fsdp"] == pytest.approx(values["ddp"], rel=1e-5)


def test_checkpoints_hold_the_same_under_every_strategy(trained: Mapping[str, Run]) -> None:
    """By name and shape under all; of the same mathematics also by value, the state of LAMB included."""
    held = {name: checkpoint_of(run) for name, run in trained.items()}
    shapes = {name: {key: tensor.shape for key, tensor in tensors.items()} for name, tensors in held.items()}
    assert shapes == dict.fromkeys(held, shapes["ddp"])
    for name in alike(trained):
        for key, tensor in held["ddp"].items():
            assert torch.allclose(held[name][key], tensor, rtol=1e-5, atol=1e-5), (name, key)


def test_every_strategy_ends_with_a_valid_record(trained: Mapping[str, Run]) -> None:
    assert {name: record(run).state for name, run in trained.items()} == dict.fromkeys(STRATEGIES, "valid")


@pytest.mark.parametrize(("name", "times"), [("fsdp", 2), ("fsdp-gradients", 1)])
def test_sharded_training_has_the_losses_of_replicated_training(
    name: str, times: int, trained: Mapping[str, Run]
) -> None:
    """And sends what sharding takes, to the byte: `times` gathers of a block a pass, one of the rest, and one scatter,
    which Gloo makes an all-reduce of (bytes on `lo`: benchmarks/strategies.py).
    """
    run, model = trained[name], build_model(trained[name].plan.workload.model)
    for rank in range(2):
        losses, expected = (read_steps(one.folder.steps(rank)).steps["loss"] for one in (run, trained["ddp"]))
        assert losses == pytest.approx(expected, rel=1e-5)
    found = record(run)
    assert found.exchange is not None
    blocks = sum(parameter.nbytes for block in model.blocks for parameter in block.parameters())
    rest = sum(parameter.nbytes for parameter in model.parameters()) - blocks
    assert found.exchange.bytes_inside == (2 * times * blocks + 2 * rest + 2 * (blocks + rest)) / 2
    sent = Counter(one.method for one in found.exchange.messages)
    assert sent == {"all-gather": 2 * (2 * times + 1), "reduce-scatter": 3}
    proof = {one.key: one for one in found.settings}["engine.fsdp.shard"]
    assert proof.effective == proof.requested == run.plan.engine.fsdp.shard
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert f"all ranks hold {elements} elements" in proof.evidence


@pytest.mark.parametrize(("name", "gathered"), [("fsdp", {"forward", "backward"}), ("fsdp-gradients", {"forward"})])
def test_sharded_training_tells_what_it_waited_for(name: str, gathered: set[str], trained: Mapping[str, Run]) -> None:
    for rank in record(trained[name]).ranks:
        assert rank.waits is not None
        assert set(rank.waits.gather_s) == gathered
        # Of three reduce-scatters the last one begins the exchange phase; LAMB and clipping sum their norms.
        assert set(rank.waits.exchange_s) == {"backward", "optimizer"}
        waited = sum(rank.waits.gather_s.values()) + sum(rank.waits.exchange_s.values())
        assert 0 < waited < rank.measured_s
    steps = read_steps(trained[name].folder.steps(0)).measured
    assert (steps["exchange_ns"] > 0).all()


def test_a_sharded_update_is_bit_for_bit_that_of_every_rank(trained: Mapping[str, Run]) -> None:
    ddp, zero = record(trained["ddp"]), record(trained["zero-1"])
    found, expected = ({rank.final_parameters_sha256 for rank in one.ranks} for one in (zero, ddp))
    assert len(found) == 1
    assert found == expected
    assert [rank.last_loss for rank in zero.ranks] == [rank.last_loss for rank in ddp.ranks]


def test_each_rank_keeps_a_part_of_the_optimizers_state_and_tells_how_much(trained: Mapping[str, Run]) -> None:
    run = trained["zero-1"]
    (setting,) = [one for one in record(run).settings if one.key == "engine.ddp.shard_optimizer"]
    told, _, rest = setting.evidence.removeprefix("bytes of state by rank: ").partition(" = ")
    by_rank = [int(size) for size in told.split(" + ")]
    (path,) = run.folder.checkpoints.glob("*.safetensors")
    whole = sum(tensor.nbytes for name, tensor in load_file(path).items() if name.startswith("optimizer/"))
    assert len(by_rank) == 2
    assert all(0 < size < whole for size in by_rank)
    assert sum(by_rank) == whole
    assert f"largest over mean {max(by_rank) / (whole / 2):.3f}" in rest
    assert setting.effective is True


def test_updated_parameters_are_broadcast_within_the_update(trained: Mapping[str, Run]) -> None:
    ddp, zero = record(trained["ddp"]), record(trained["zero-1"])
    assert ddp.exchange is not None
    assert zero.exchange is not None
    assert zero.exchange.of_gradients == zero.exchange.messages[: len(zero.exchange.of_gradients)]
    sent = zero.exchange.messages[len(zero.exchange.of_gradients) :]
    # All parameters of BERT are trained, so that they are as long as their gradients.
    assert sum(message.num_bytes for message in sent) == zero.gradient_bytes
    assert {message.method for message in sent} == {"gloo broadcast"}
    # The mean of two ranks, of which each sends its share to the other one.
    assert ddp.exchange.bytes_inside is not None
    assert zero.exchange.bytes_inside == ddp.exchange.bytes_inside + zero.gradient_bytes / 2
    for rank in zero.ranks:
        assert rank.waits is not None
        assert 0 < rank.waits.exchange_s["optimizer"] < rank.measured_s
        assert not rank.waits.gather_s
    assert all(rank.waits is None for rank in ddp.ranks)


def test_local_sgd_averages_parameters_and_counts_its_bytes(trained: Mapping[str, Run]) -> None:
    """Three warm-up steps and two measured ones; the checkpoint behind the fifth update forces an average."""
    before, after = record(trained["ddp"]), record(trained["local"])
    assert before.exchange is not None
    assert after.exchange is not None
    assert trained["local"].plan.strategy == "local-sgd"
    proof = {one.key: one for one in after.settings}["sync.average_every"]
    assert (proof.requested, proof.effective) == (2, 2)
    assert proof.evidence.startswith("2 averages of ")
    assert "in 5 independent updates, and 1 for checkpoints and the end; before the last" in proof.evidence
    # LAMB has two moments: an average is three times as large as the gradients, here after one of two measured steps.
    (average,) = after.exchange.messages
    assert average.num_bytes == 3 * after.gradient_bytes
    assert after.exchange.bytes_inside == average.num_bytes / 2
    assert before.exchange.bytes_inside == before.gradient_bytes
    (same_end,) = [check for check in after.checks if check.name == "identical parameters"]
    assert same_end.passed
    assert after.ranks[0].final_parameters_sha256 != before.ranks[0].final_parameters_sha256


def test_post_local_sgd_is_ddp_until_its_update(trained: Mapping[str, Run]) -> None:
    ddp, local, post = (
        read_steps(trained[name].folder.steps(1)).steps["loss"].tolist() for name in ("ddp", "local", "post-local")
    )
    # A loss is that of the parameters before its update, so that the fourth is the first after an update apart.
    assert post[:3] == ddp[:3]
    assert local[1] != ddp[1]
    assert post[3] != ddp[3]
    found = record(trained["post-local"])
    assert found.exchange is not None
    assert found.exchange.exchange == "flat until update 2, then average every 2 updates"
    assert {one.key: one.effective for one in found.settings}["sync.average_from"] == 2


def require_losses_of_ddp(name: str, trained: Mapping[str, Run]) -> None:
    """Both ranks have the loss of their replica, the mean over ranks of DDP."""
    first, second = (read_steps(trained[name].folder.steps(rank)).steps["loss"].tolist() for rank in range(2))
    assert first == second
    assert first == pytest.approx(mean_losses(trained["ddp"]), rel=1e-5)


def test_ranks_that_share_layers_train_as_ddp_and_send_the_bytes_of_the_formula(trained: Mapping[str, Run]) -> None:
    """Two layers of 128 features, 64 positions; a step has 16 samples in two parts."""
    require_losses_of_ddp("tensor", trained)
    run, found = trained["tensor"], record(trained["tensor"])
    assert (run.plan.strategy, run.plan.ranks_per_replica) == ("tensor", 2)
    assert [rank.samples for rank in found.ranks] == [2 * 8, 2 * 8]
    assert found.data == record(trained["ddp"]).data
    assert found.exchange is not None
    assert {(one.method, one.num_bytes) for one in found.exchange.messages} == {
        ("all-reduce of activations", 8 * 64 * 128 * 4)
    }
    assert len(found.exchange.messages) == 4 * 2 * 2
    assert (found.exchange.bytes_inside, found.exchange.bytes_across) == (4 * 2 * 16 * 64 * 128 * 4, 0)
    proof = {one.key: one for one in found.settings}["engine.fsdp.tensor_ranks"]
    assert (proof.requested, proof.effective) == (2, 2)
    for rank in found.ranks:
        assert rank.waits is not None
        assert min(rank.waits.exchange_s[phase] for phase in ("forward", "backward", "optimizer")) > 0
        assert rank.waits.gather_s == {}


@pytest.mark.parametrize(("name", "parts", "order"), [("gpipe", 2, "FFBB"), ("1f1b", 4, "FBFBFBFB")])
def test_stages_train_as_ddp_and_send_the_bytes_of_the_formula(
    name: str, parts: int, order: str, trained: Mapping[str, Run]
) -> None:
    require_losses_of_ddp(name, trained)
    run, found = trained[name], record(trained[name])
    assert (run.plan.strategy, run.plan.ranks_per_replica) == ("pipeline", 2)
    assert [rank.samples for rank in found.ranks] == [2 * 8, 2 * 8]
    assert found.exchange is not None
    *sends, tied = found.exchange.messages
    assert [(one.method, one.num_bytes) for one in sends] == [
        ("send of activations", 16 // parts * 64 * 128 * 4)
    ] * parts
    embedding_bytes = 4096 * 128 * 4
    assert (tied.method, tied.num_bytes) == ("all-reduce", embedding_bytes)
    # A batch of 16 samples forward and back; a ring of two sends the gradient of the embedding once from each.
    assert found.exchange.sent_bytes == 16 * 64 * 128 * 4 + embedding_bytes
    proof = {one.key: one for one in found.settings if one.key.startswith("engine.pipeline.")}
    assert all(one.requested is None or one.effective == one.requested for one in proof.values())
    assert order in proof["engine.pipeline.schedule"].evidence
    stages = [rank.stage for rank in found.ranks if rank.stage is not None]
    assert [stage.number for stage in stages] == [0, 1]
    assert sum(stage.num_parameters for stage in stages) == found.num_parameters + 4096 * 128
    # Where the cut is follows from times; a parameter of the other stage takes the bytes of one element.
    held = [rank.held.weights for rank in found.ranks if rank.held is not None]
    assert held == pytest.approx([4 * stage.num_parameters for stage in stages], abs=4 * 100)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_waiting_for_other_stages_is_a_part_of_the_step(name: str, trained: Mapping[str, Run]) -> None:
    found = record(trained[name])
    for rank in found.ranks:
        assert rank.stage is not None
        assert rank.waits is not None
        waited_s = sum(rank.waits.stages_s.values())
        assert rank.stage.busy_s + waited_s == pytest.approx(rank.stage.passes_s)
        assert 0 < rank.stage.passes_s < rank.measured_s
    causes = causes_of(trained[name])
    assert sum(causes.sums_ns.values()) == causes.ranks * round(1e9 * max(rank.measured_s for rank in found.ranks))
    bubble_s = causes.sums_ns["bubble"] / 1e9
    passes_s = sum(rank.stage.passes_s for rank in found.ranks if rank.stage is not None)
    assert found.bubble == pytest.approx(bubble_s / passes_s, rel=1e-3)
    assert "(p-1)/(m+p-1) = " in causes.evidence["bubble"]


def test_stages_have_the_losses_and_the_quality_of_one_rank(everything: Everything, tmp_path: Path) -> None:
    """Over text, whose samples have unequal numbers of masked words."""
    words = [word if word != "train.batch_per_rank=4" else "train.batch_per_rank=8" for word in OF_TEXT]
    words[words.index("--ranks") + 1] = "1"
    data = everything.sharing["text 1f1b"].plan.workload.data.source
    (alone,) = run_forked("bert", *words, "--engine", "single", "--data", data, "--out", tmp_path)
    together = everything.sharing["text 1f1b"]
    losses = [read_steps(run.folder.steps(0)).steps["loss"] for run in (alone, together)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    qualities = [record(run).quality for run in (alone, together)]
    found = [[(each.value, each.loss) for each in quality.evaluations] for quality in qualities if quality is not None]
    assert np.array(found[1]) == pytest.approx(np.array(found[0]), rel=1e-5)


def test_ranks_that_share_layers_draw_the_same_dropout_and_a_rank_that_does_not_is_found(
    everything: Everything,
) -> None:
    alike, apart = (record(everything.sharing[what]).checks for what in ("tensor", "DRIFT"))
    assert all(check.passed for check in (*alike, *record(everything.sharing["1f1b"]).checks))
    assert [check.name for check in apart if not check.passed] == ["identical parameters"]


@pytest.mark.parametrize("name", ["tensor", "1f1b"])
def test_ranks_that_share_a_network_read_and_evaluate_each_sample_once(name: str, everything: Everything) -> None:
    found = record(everything.sharing[f"text {name}"])
    assert found.state == "valid"
    assert found.quality is not None
    assert [each.samples for each in found.quality.evaluations] == [64, 128]
    assert {each.eval_samples for each in found.quality.evaluations} == {37}
    assert found.shuffle is not None
    whole = [epoch for epoch in found.shuffle.epochs if epoch.is_whole]
    assert whole
    assert {epoch.visits + epoch.left_out for epoch in whole} == {found.quality.train_samples}
    assert sum(epoch.visits for epoch in found.shuffle.epochs) == found.steps * 8
