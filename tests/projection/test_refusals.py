"""Every refusal and every flag has a planted case, and says what would mend it."""

from __future__ import annotations

from typing import Any

import pytest

from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures
from dlbench.projection.refusals import FLAGS, REFUSALS, flagged, flags, refusal, refused
from dlbench.records.exchange import ExchangeResult
from dlbench.specs.comm import Level, NetworkModel, Piece

LEVEL = Level(pieces=(Piece(alpha_s=1e-5, beta_s_per_byte=1e-9),))
NETWORK = NetworkModel(system="box", transport="torch-gloo", inside=LEVEL, across=LEVEL)
EXCHANGE = ExchangeResult(
    carrier="gloo", by="backend", exchange="flat", fusion="auto", wire="fp32", group_size=2, num_groups=4, evidence=""
)


def runs(ranks: int, steps: tuple[float, ...], session: str = "s") -> tuple[RunFigures, ...]:
    return tuple(
        RunFigures(run_id=f"{ranks}-{place}", session=session, step_s=step, parts={"compute": step})
        for place, step in enumerate(steps)
    )


def point(ranks: int, nodes: int, **changes: Any) -> PointFigures:
    found: dict[str, Any] = {"batch_per_rank": 32, "runs": runs(ranks, (0.1, 0.101, 0.102))}
    return PointFigures(ranks=ranks, nodes=nodes, **(found | changes))


POINTS = (point(2, 1), point(4, 2), point(8, 4))


def made(**changes: Any) -> Ingredients:
    """Runs on 1, 2 and 4 nodes of two ranks, of which nothing is to be refused."""
    sound: dict[str, Any] = {"title": "t", "source": "s", "system": "box", "points": POINTS}
    return Ingredients(**(sound | {"network": NETWORK, "exchange": EXCHANGE} | changes))


ONE_NODE = tuple(point(ranks, 1) for ranks in (1, 2, 4))
STRONG = {"scaling": "strong", "points": tuple(point(r, n, batch_per_rank=b) for r, n, b in ((2, 1, 64), (8, 4, 16)))}
BATCHES = [{"batch_per_rank": b, "own_work_s": (0.01 * b,)} for b in (16, 64)]


@pytest.mark.parametrize(
    ("code", "changes", "ranks", "remedy"),
    [
        ("R1", {"points": (point(2, 1), point(4, 2, runs=runs(4, (0.1,))))}, 8, "--repeats 5"),
        ("R2", {"points": ONE_NODE}, 8, "--nodes 1,2,4"),
        ("R3", {"network": None}, 16, "dlbench comm submit --system box"),
        ("R3", {"network": NETWORK.model_copy(update={"across": None})}, 16, "dlbench comm submit --system box"),
        ("R3", {"network": NETWORK.model_copy(update={"inside": None})}, 16, "dlbench comm submit --system box"),
        ("R3", {"nodes_per_leaf": 4}, 16, "on two leaves"),
        ("R4", {"is_crowded": True}, 16, "cores of their own"),
        ("R6", {"points": (point(2, 1), point(4, 2, runs=runs(4, (0.1, 0.15, 0.2))))}, 8, "repeat"),
        ("R7", {}, 9, "ask for 10"),
        ("R7", {}, 1, "measure"),
        ("R7", {}, 1024, "measure 16 ranks or more"),
        ("R7", {**STRONG, "batches": BATCHES}, 10, "divisor"),
        ("R8", {"exchange": None}, 16, "measure it"),
        ("R8", {"points": (point(4, 2, runs=tuple(RunFigures(run_id=n, step_s=0.1) for n in "abc")),)}, 8, "measure"),
        ("R9", STRONG, 16, "--set train.batch_per_rank=8"),
        ("R9", {**STRONG, "batches": BATCHES}, 64, "--set train.batch_per_rank=2"),
    ],
)
def test_what_was_never_measured_in_kind_is_refused_with_its_remedy(
    code: str, changes: dict[str, Any], ranks: int, remedy: str
) -> None:
    found = refusal(made(**changes), ranks)
    assert found is not None
    assert found.code == code
    assert remedy in found.remedy
    assert "{" not in found.text + found.remedy


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 16),
        ({}, 512),
        ({"points": ONE_NODE, "ranks_per_node": 8}, 8),
        ({"nodes_per_leaf": 4, "leaf_taper": 2.0}, 16),
        ({"nodes_per_leaf": 4, "network": NETWORK.model_copy(update={"beyond": LEVEL})}, 16),
        ({**STRONG, "batches": BATCHES}, 16),
        ({**STRONG, "batches": BATCHES}, 32),
    ],
)
def test_what_was_measured_in_kind_is_not_refused(changes: dict[str, Any], ranks: int) -> None:
    assert refusal(made(**changes), ranks) is None


def test_points_alone_need_no_network_but_reach_less_far() -> None:
    bare = made(network=None, exchange=None)
    assert refusal(bare, 32, by="points") is None
    found = refusal(bare, 64, by="points")
    assert found is not None
    assert found.code == "R7"


def test_codes_that_only_the_model_knows_have_their_words() -> None:
    words = {"what": "its exchange takes 9 times what they give", "known": "two batches"}
    texts = [refused(code, None, **words) for code in ("R5", "R8", "R10")]
    assert all(words["what"] in one.text or words["known"] in one.text for one in texts)
    assert all(one.remedy for one in texts)
    flag = flagged("F5", needed="9 GB/s", proven="4 GB/s", nodes=8)
    assert "9 GB/s" in flag.text
    assert set(REFUSALS) == {f"R{number}" for number in range(1, 11)}


HOSTS = {"hosts": (0.0, 0.01, 0.0, 0.02), "maxima": (0.0, 0.1), "num_maxima": 64}


@pytest.mark.parametrize(
    ("code", "changes", "ranks"),
    [
        ("F1", {"points": POINTS[:2]}, 8),
        ("F2", {}, 128),
        ("F3", {}, 16),
        ("F3", {"nodes": {**HOSTS, "hosts": (0.0, 0.01)}}, 16),
        ("F4", {"nodes": HOSTS}, 64),
        ("F6", {"points": (*POINTS[:2], point(8, 4, runs=runs(8, (0.1, 0.1, 0.1), "t")))}, 16),
    ],
)
def test_what_a_figure_does_not_know_is_flagged_beside_it(code: str, changes: dict[str, Any], ranks: int) -> None:
    known = {
        one.code
        for one in flags(
            made(**{"nodes": HOSTS, **changes, **({} if code != "F3" or changes else {"nodes": None})}), ranks
        )
    }
    assert code in known
    assert known <= set(FLAGS)
    assert code not in {one.code for one in flags(made(nodes=HOSTS), 16)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"points": (point(2, 1), point(2, 2))}, "ascend by ranks"),
        ({"points": (point(3, 2), point(4, 2))}, "does not fill nodes of 2 ranks"),
        ({"points": [{"ranks": 2, "nodes": 1, "runs": [{"run_id": "a", "step_s": -0.1}]}]}, "greater than 0"),
        (
            {
                "points": [
                    {"ranks": 2, "nodes": 1, "runs": [{"run_id": "a", "step_s": 0.1, "parts": {"compute": 0.05}}]}
                ]
            },
            "the causes of run a sum to 0.05 s, its step is 0.1 s",
        ),
    ],
)
def test_ingredients_that_contradict_themselves_are_none(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        made(**changes)
