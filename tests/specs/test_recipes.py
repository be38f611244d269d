"""Published recipes and data sheets: rows as they are, nothing made up beyond them, no target that is out of reach."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.comparability import averaged_id, system_content
from dlbench.errors import UserError
from dlbench.node.models.optimizers import LearningRate
from dlbench.records.scan import Run
from dlbench.specs.choices import WorkloadFile, choose_system, choose_system_with_origins
from dlbench.specs.expand import expand
from dlbench.specs.files import available, find, read_yaml
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from dlbench.specs.system import NetworkSpec, SystemSpec
from dlbench.specs.training import RatePoint, place_in
from tests.conftest import Cli
from tests.support.run_factory import plans

BUNDLED = [
    (name, preset)
    for name in ("resnet50", "bert", "cosmoflow")
    for preset in WorkloadFile(find("workloads", name)).presets
]


@pytest.fixture(autouse=True)
def bundled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLBENCH_PATH", raising=False)


def plan_of(workload: str, preset: str, ranks: int = 1, **settings: Any) -> RunPlan:
    asked = {key.replace("__", "."): value for key, value in settings.items()}
    request = Request(workload=workload, preset=preset, points=(ranks,), overrides=asked)
    return expand(request, machine_cores=ranks)[0]


@pytest.mark.parametrize(("workload", "preset"), BUNDLED)
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_every_preset_is_a_plan_with_a_rate_for_every_step(workload: str, preset: str, ranks: int) -> None:
    plan = plan_of(workload, preset, ranks)
    train = plan.workload.train
    epoch = train.schedule.epoch_samples
    rate = LearningRate(
        train, global_batch=plan.global_batch, steps_per_epoch=epoch / plan.global_batch if epoch else None
    )
    rates = [rate.at(step) for step in (0, 1, 10, 1000, 100_000, 10_000_000)]
    largest = max(rate.peak, train.optimizer.learning_rate)  # warm-up may begin at the rate before scaling
    assert all(0 <= one <= largest * (1 + 1e-9) for one in rates)
    assert rates[0] > 0


@pytest.mark.parametrize("workload", ["resnet50", "bert", "cosmoflow"])
def test_preset_gpu_compiled_is_gpu_but_for_the_program(workload: str) -> None:
    eager, compiled = (plan_of(workload, preset) for preset in ("gpu", "gpu-compiled"))
    update = {"train": eager.workload.train.model_copy(update={"compile": "reduce-overhead"})}
    update |= {"preset": "gpu-compiled", "about": compiled.workload.about}
    assert compiled.workload == eager.workload.model_copy(update=update)
    assert (compiled.measure, compiled.goal) == (eager.measure, eager.goal)
    # One update of several parts cannot be replayed, and is refused with what to do.
    with pytest.raises(UserError, match="compile reduce-overhead needs gradient_accumulation 1"):
        plan_of(workload, "gpu-compiled", train__gradient_accumulation=2)
    assert plan_of(workload, "gpu-compiled", train__gradient_accumulation=2, train__compile="default")


# --- rows


def in_force(plan: RunPlan) -> tuple[object, ...]:
    train = plan.workload.train
    now = train.at_batch(plan.global_batch)
    peak = train.optimizer.peak(plan.global_batch)
    rule, schedule = now.optimizer, now.schedule
    length = schedule.total_steps if schedule.total_steps is not None else schedule.total_epochs
    warmup = schedule.warmup_steps if schedule.warmup_epochs is None else schedule.warmup_epochs
    return (
        pytest.approx(peak),
        warmup,
        length,
        rule.weight_decay,
        rule.betas if rule.name == "lamb" else rule.momentum,
    )


@pytest.mark.parametrize(
    ("ranks", "batch", "row"),
    [
        (16, 256, (10, 5, 42, 2e-4, 0.9)),
        (32, 256, (17, 5, 44, 2e-4, 0.9)),
        (128, 256, (21.2, 16, 58, 2.5e-5, 0.94)),
        (256, 256, (24.699, 31, 89, 1e-4, 0.951807)),
        (1, 1024, (2.5, 5, 42, 2e-4, 0.9)),  # below: linear
        (1, 20_480, (19.1, 5, 44, 2e-4, 0.9)),  # half-way between 8,192 and 32,768: the rate; the rest of the lower
        (2, 65_536, (24.699, 31, 89, 1e-4, 0.951807)),  # beyond
    ],
)
def test_lars_has_the_published_rows(ranks: int, batch: int, row: tuple[object, ...]) -> None:
    assert in_force(plan_of("resnet50", "full", ranks, train__batch_per_rank=batch)) == row


@pytest.mark.parametrize(
    ("batch", "row"),
    [
        (256, (3.5e-4, 0, 1.0, 0.01, (0.9, 0.999))),
        (1536, (2e-3, 0, 2254, 0.01, (0.66, 0.996))),
        (3072, (2e-3, 100, 1141, 0.01, (0.66, 0.998))),
        (4096, (2.4e-3, 0, 855, 0.01, (0.66, 0.998))),
        (64, (1.75e-4, 0, 1.0, 0.01, (0.9, 0.999))),  # below: the root
    ],
)
def test_lamb_has_the_published_rows(batch: int, row: tuple[object, ...]) -> None:
    assert in_force(plan_of("bert", "full", train__batch_per_rank=batch)) == row


@given(
    batches=st.lists(st.integers(1, 10_000), min_size=1, max_size=6, unique=True).map(sorted),
    rates=st.lists(st.floats(1e-3, 50), min_size=6, max_size=6),
    batch=st.integers(1, 12_000),
)
def test_a_rate_never_leaves_what_was_published_around_it(batches: list[int], rates: list[float], batch: int) -> None:
    table = [RatePoint(batch=b, learning_rate=r) for b, r in zip(batches, rates, strict=False)]
    place = place_in(table, batch, below="linear")
    near = [row.learning_rate for row in (place.row, place.above) if row is not None]
    if place.where == "below":
        assert place.learning_rate == pytest.approx(near[0] * batch / batches[0])
    else:
        assert min(near) - 1e-12 <= place.learning_rate <= max(near) + 1e-12
    assert (place.where == "row") == (batch in batches)
    assert (place.where == "beyond") == (batch > batches[-1])


@pytest.mark.parametrize(
    ("key", "value", "batch"),
    [
        ("train.optimizer.weight_decay", 0.1, 32_768),
        ("train.optimizer.momentum", 0.5, 32_768),
        ("train.schedule.warmup_epochs", 1.0, 32_768),
        ("train.schedule.total_epochs", 50.0, 8192),
    ],
)
def test_what_a_row_replaces_cannot_be_set(key: str, value: float, batch: int) -> None:
    with pytest.raises(UserError, match=r"the row of train\.optimizer\.learning_rate_table for this global batch"):
        plan_of("resnet50", "full", 1, **{"train.batch_per_rank": batch, key: value})
    assert plan_of("resnet50", "full", 1, **{"train.batch_per_rank": 4096, key: value})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"learning_rate_table": []}, "learning_rate_scaling table needs learning_rate_table"),
        ({"learning_rate_table": [{"batch": 9, "learning_rate": 1}, {"batch": 8, "learning_rate": 1}]}, "must ascend"),
        ({"reference_batch": 100}, "reference_batch 100 is not a row"),
        (
            {"learning_rate_table": [{"batch": 4096, "learning_rate": 1, "total_steps": 2, "total_epochs": 1.0}]},
            r"exclude each other \(row 4096",
        ),
    ],
)
def test_a_wrong_table_is_refused(change: dict[str, Any], text: str) -> None:
    rule = plan_of("resnet50", "full").workload.train.optimizer
    with pytest.raises(ValueError, match=text):
        type(rule).model_validate({**rule.model_dump(), **change})


# --- targets


def to_target(workload: str, preset: str, ranks: int = 1, **settings: Any) -> RunPlan:
    return plan_of(workload, preset, ranks, measure__until="quality", data__source="/data", **settings)


def test_a_target_that_is_out_of_reach_is_not_offered() -> None:
    for preset in ("full", "gpu"):
        with pytest.raises(
            UserError, match=r"reaches 0\.72 from trained weights only: set checkpoint\.initialize_from"
        ):
            to_target("bert", preset)
    assert to_target("bert", "full", checkpoint__initialize_from="/phase1.safetensors")
    assert to_target("bert", "full", checkpoint__resume_from="/run")
    for preset in ("phase1", "phase2", "base"):
        with pytest.raises(UserError, match=rf"preset {preset} of bert has no `quality` section"):
            to_target("bert", preset)
    with pytest.raises(UserError, match=r"131,072 is beyond the last row of .* \(65,536\): no published rate"):
        to_target("resnet50", "full", 2, train__batch_per_rank=65_536)
    with pytest.raises(UserError, match=r"8,192 is beyond the last row of .* \(4,096\)"):
        to_target("resnet50", "gpu", 32)
    for workload in ("resnet50", "bert", "cosmoflow"):
        assert to_target(workload, "ci", 4)
        if workload != "bert":
            assert to_target(workload, "gpu", 8)


def test_a_longer_recipe_gives_up_later() -> None:
    short, long = (to_target("resnet50", "full", ranks, train__batch_per_rank=4096) for ranks in (1, 8))
    assert short.goal is not None
    assert long.goal is not None
    assert short.goal.max_epochs == 44
    assert long.goal.max_epochs == pytest.approx(44 * 58 / 42)
    bert = to_target("bert", "gpu", 8, checkpoint__initialize_from="/x").goal
    assert bert.max_samples == 6700 * 448


# --- a global batch of its own


@pytest.mark.parametrize(("preset", "batch", "part"), [("phase1", 65_536, 256), ("phase2", 32_768, 32)])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_a_phase_has_its_published_batch_at_every_rank_count(preset: str, batch: int, part: int, ranks: int) -> None:
    plan = plan_of("bert", preset, ranks)
    train = plan.workload.train
    assert (plan.global_batch, train.batch_per_rank // train.gradient_accumulation) == (batch, part)
    assert plan.workload.quality is None
    place = train.optimizer.place(plan.global_batch)
    assert place.where == "row"


def test_a_global_batch_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"65,536 over 3 ranks is not a multiple of 256"):
        plan_of("bert", "phase1", 3)
    with pytest.raises(UserError, match=r"decides train\.gradient_accumulation"):
        plan_of("bert", "phase1", 1, train__gradient_accumulation=2)
    with pytest.raises(UserError, match="use --scaling strong"):
        expand(Request(workload="bert", preset="phase1", points=(1, 2)), machine_cores=2)
    strong = expand(Request(workload="bert", preset="phase1", points=(1, 2), scaling="strong"), machine_cores=2)
    assert [plan.global_batch for plan in strong] == [65_536, 65_536]


def test_a_pickle_is_refused_with_how_to_convert_it() -> None:
    with pytest.raises(UserError, match=r"model\.bin: only safetensors are read.*save_file") as caught:
        plan_of("bert", "full", checkpoint__initialize_from="/x/pytorch_model.bin")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="resume_from and initialize_from exclude each other"):
        plan_of("bert", "full", checkpoint__initialize_from="/x", checkpoint__resume_from="/y")


MODELLED = ("abci", "p40-roce")
LINK = {"alpha_s": 1e-6, "gb_per_s": 10, "source": "a data sheet"}


@pytest.mark.parametrize("name", MODELLED)
def test_a_modelled_system_says_so_and_names_a_source_of_every_value(name: str) -> None:
    system = choose_system_with_origins(name, {})[0]
    assert system.modelled
    assert system.title.endswith("(modelled, not measured)")
    text = available("systems")[name].read_text(encoding="utf-8")
    head = text[: text.index("format: ")]
    assert "modelled, not measured. dlbench never ran there." in " ".join(head.replace("#", "").split())
    assert re.search(r"# Sources, 20\d\d-\d\d-\d\d, read: ", head)
    content = read_yaml(available("systems")[name])
    links = [content["network"][level] for level in ("inside", "across")]
    assert all("start-up: " in link["source"] and "rate: " in link["source"] for link in links)
    assert content["device"]["source"].startswith(("memory: ", "NVIDIA "))


@pytest.mark.parametrize(
    "command", [("run", "resnet50", "--system"), ("submit", "bert", "--nodes", "1", "--system"), ("preflight",)]
)
def test_nothing_runs_on_a_modelled_system(cli: Cli, command: tuple[str, ...]) -> None:
    done = cli(*command, "abci", *(("--dry-run",) if command[0] != "preflight" else ()))
    assert done.returncode == 2
    assert "abci: modelled is true: it is only described by a data sheet; use another one" in done.stderr


@pytest.mark.parametrize(
    ("network", "why"),
    [
        ({"across": LINK, "leaf_taper": 2.0}, "leaf_taper and beyond need nodes_per_leaf"),
        ({"across": LINK, "nodes_per_leaf": 8}, "nodes_per_leaf needs leaf_source"),
        (
            {"beyond": {**LINK, "links": 4}, "leaf_taper": 2.0, "nodes_per_leaf": 8, "leaf_source": "x"},
            "have the same meaning",
        ),
        ({"across": {**LINK, "speed": 3}}, "speed"),
        ({"across": {"alpha_s": 1e-6, "gb_per_s": 10}}, "source"),
        ({"across": {**LINK, "gb_per_s": -1}}, "gb_per_s"),
        ({"across": {**LINK, "links": 0}}, "links"),
    ],
)
def test_a_network_that_contradicts_itself_is_refused(network: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NetworkSpec(**network)


def test_data_sheets_separate_no_runs_and_are_refused_as_a_setting_of_runs() -> None:
    (plan,) = plans(points=(1,), repeats=1)
    sheets = choose_system_with_origins("abci", {})[0].model_dump(include={"device", "network"})
    system = SystemSpec.model_validate({**plan.system.model_dump(), **sheets})
    bare, stated = (
        cast("Run", SimpleNamespace(plan=one, record=None))
        for one in (plan, plan.model_copy(update={"system": system}))
    )
    assert averaged_id(bare) == averaged_id(stated)
    assert system_content(bare.plan) == system_content(stated.plan)
    with pytest.raises(UserError, match=r"system\.device\.memory_gb_per_s: has no effect in any run"):
        plans(points=(1,), overrides={"system.device.memory_gb_per_s": 100.0, "system.device.source": "x"})
    with pytest.raises(UserError, match="modelled is true"):
        choose_system("local", {"modelled": (True, "--set")})
