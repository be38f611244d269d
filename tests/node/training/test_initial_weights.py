"""Weights to begin with: BERT's public layout gives the logits of a plain forward pass over the same tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from dlbench.errors import IncompleteDataError, UserError
from dlbench.node.models.bert import BertForPreTraining
from dlbench.node.training.optional_parts import load_initial
from dlbench.specs.weights_file import own_name, require_weights
from dlbench.specs.workload import BertModel, ResNetModel
from tests.support.one_rank import progress_at, write_checkpoint

VOCABULARY, HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 90, 16, 2, 4, 32, 12
Tensors = dict[str, Tensor]


def network(vocabulary: int = VOCABULARY, positions: int = POSITIONS) -> BertForPreTraining:
    torch.manual_seed(1)
    return BertForPreTraining(vocabulary, HIDDEN, LAYERS, HEADS, INNER, positions, dropout=0.0).eval()


def published(rows: int = VOCABULARY, positions: int = POSITIONS) -> Tensors:
    """A checkpoint with the public names, all tensors different, decoder tied."""
    torch.manual_seed(2)
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (rows, HIDDEN),
        "bert.embeddings.position_embeddings.weight": (positions, HIDDEN),
        "bert.embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "cls.predictions.bias": (rows,),
    }
    linears = {
        "bert.pooler.dense": (HIDDEN, HIDDEN),
        "cls.predictions.transform.dense": (HIDDEN, HIDDEN),
        "cls.seq_relationship": (2, HIDDEN),
    }
    norms = ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    for number in range(LAYERS):
        layer = f"bert.encoder.layer.{number}"
        linears |= {f"{layer}.attention.self.{part}": (HIDDEN, HIDDEN) for part in ("query", "key", "value")}
        linears[f"{layer}.attention.output.dense"] = (HIDDEN, HIDDEN)
        linears[f"{layer}.intermediate.dense"] = (INNER, HIDDEN)
        linears[f"{layer}.output.dense"] = (HIDDEN, INNER)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name, (outputs, inputs) in linears.items():
        shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    for name in norms:
        shapes |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    found = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    found["cls.predictions.decoder.weight"] = found["bert.embeddings.word_embeddings.weight"].clone()
    return found


def plain_logits(t: Tensors, ids: Tensor, types: Tensor, keep: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Devlin et al. 2018 over tensors with public names, written out: no module and no attention kernel."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        away = x - x.mean(-1, keepdim=True)
        return away / (away.square().mean(-1, keepdim=True) + 1e-12).sqrt() * t[f"{name}.weight"] + t[f"{name}.bias"]

    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, HIDDEN // HEADS).transpose(1, 2)

    table = "bert.embeddings"
    x = t[f"{table}.word_embeddings.weight"][ids] + t[f"{table}.token_type_embeddings.weight"][types]
    x = norm(x + t[f"{table}.position_embeddings.weight"][: ids.shape[1]], f"{table}.LayerNorm")
    for number in range(LAYERS):
        layer = f"bert.encoder.layer.{number}"
        q, k, v = (heads(linear(x, f"{layer}.attention.self.{part}")) for part in ("query", "key", "value"))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = scores.masked_fill(keep[:, None, None, :] == 0, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = norm(x + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        inner = functional.gelu(linear(x, f"{layer}.intermediate.dense"))
        x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    chosen = torch.stack([row[at] for row, at in zip(x, places, strict=True)])
    hidden = functional.gelu(linear(chosen, "cls.predictions.transform.dense"))
    hidden = norm(hidden, "cls.predictions.transform.LayerNorm")
    words = hidden @ t[f"{table}.word_embeddings.weight"].T + t["cls.predictions.bias"]
    return words, linear(torch.tanh(linear(x[:, 0], "bert.pooler.dense")), "cls.seq_relationship")


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    keep = torch.ones(3, 8, dtype=torch.long)
    keep[1, 6:] = 0
    ids = torch.randint(VOCABULARY, (3, 8))
    return ids, torch.randint(2, (3, 8)), keep, torch.tensor([[0, 3], [1, 2], [7, 7]])


def require_equal_logits(tensors: Tensors, model: BertForPreTraining) -> None:
    ids, types, keep, places = batch()
    with torch.no_grad():
        ours = model(ids, types, keep, places)
    theirs = plain_logits(tensors, ids, types, keep, places)
    # Sums of at most 32 products of numbers near 1, in another order.
    torch.testing.assert_close(ours[0], theirs[0][..., :VOCABULARY], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}


def with_gamma(tensors: Tensors) -> Tensors:
    renamed = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()}
    return {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in renamed.items()}


def with_constants(tensors: Tensors) -> Tensors:
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    return wrapped | {"module.bert.embeddings.position_ids": torch.arange(POSITIONS)[None]}


def with_activations(tensors: Tensors) -> Tensors:
    """NVIDIA's: dense layers that hold their activation; and the decoder's bias under its own name."""
    found = {}
    for name, tensor in tensors.items():
        new = name.replace("intermediate.dense.", "intermediate.dense_act.").replace(
            "pooler.dense.", "pooler.dense_act."
        )
        found[new.replace("predictions.bias", "predictions.decoder.bias")] = tensor
    return found


@pytest.mark.parametrize("form", [dict, without_prefix, with_gamma, with_constants, with_activations])
def test_public_names_give_the_logits_of_a_plain_forward_pass(
    tmp_path: Path, form: Callable[[Tensors], Tensors]
) -> None:
    tensors, path = published(), tmp_path / "model.safetensors"
    save_file(form(tensors), path)
    model = network()
    setting = load_initial(str(path), model, spec())
    require_equal_logits(tensors, model)
    assert setting.key == "checkpoint.initialize_from"
    assert not setting.is_without_effect
    assert "46 tensors with BERT's public names, 1 tied" in setting.evidence
    assert "SHA-256" in setting.evidence


def test_padding_and_positions_beyond_ours_are_cut_and_told(tmp_path: Path) -> None:
    tensors, path = published(rows=96, positions=20), tmp_path / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in tensors.items()}, path)
    model = network()
    found = load_initial(str(path), model, spec())
    require_equal_logits({name: tensor.half().float() for name, tensor in tensors.items()}, model)
    assert "word_embedding.weight cut from 96 to 90 rows" in found.evidence
    assert "position_embedding.weight cut from 20 to 12 rows" in found.evidence


def spec(vocabulary: int = VOCABULARY) -> BertModel:
    return BertModel(
        family="bert",
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_size=INNER,
        max_positions=POSITIONS,
    )


def test_planning_knows_the_networks_shapes_without_torch() -> None:
    assert spec().public_shapes() == {name: tuple(p.shape) for name, p in network().named_parameters()}


def test_planning_finds_by_the_header_what_a_rank_would(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(published(rows=96), path)
    require_weights(path, spec())
    require_weights(tmp_path, spec())  # a run's folder
    with pytest.raises(UserError, match=r"does not fit: bert\.embeddings\.word.*\[96, 16\].*\(and 1 more\)"):
        require_weights(path, spec(vocabulary=200))
    with pytest.raises(UserError, match="public names are only known for BERT"):
        require_weights(path, ResNetModel(family="resnet"))
    for content in (b"", b"PK\3\4 a pickle with another name", b"\2" + bytes(7) + b"[]", b"\2" + bytes(7) + b"{"):
        path.write_bytes(content)
        with pytest.raises(IncompleteDataError, match="not a readable safetensors file"):
            require_weights(path, spec())


def test_every_parameter_has_one_public_name() -> None:
    names = [own_name(name) for name in published() if "decoder" not in name]
    assert sorted(filter(None, names)) == sorted(name for name, _ in network().named_parameters())


def wrong(change: Callable[[Tensors], Any]) -> Tensors:
    tensors = published()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (wrong(lambda t: t.pop("cls.seq_relationship.bias")), "nsp_classifier.bias of this network is missing"),
        (
            wrong(lambda t: [t.pop(n) for n in list(t) if "cls" in n]),
            r"mlm_bias of this network is missing \(and 6 more\)",
        ),
        (wrong(lambda t: t.update({"qa_outputs.weight": torch.ones(2)})), "qa_outputs.weight is not a tensor of this"),
        (wrong(lambda t: t.update({"embeddings.LayerNorm.gamma": torch.ones(16)})), "are the same tensor"),
        (
            wrong(lambda t: t.update({"bert.pooler.dense.bias": torch.ones(8)})),
            r"has shape \[8\], this network's pooler",
        ),
        (wrong(lambda t: t["cls.predictions.decoder.weight"].add_(1)), "differs from .*, but this network ties them"),
        (wrong(lambda t: t.update({"cls.predictions.bias": torch.ones(96)})), "have different vocabularies"),
        (wrong(lambda t: t.update({"cls.predictions.bias": torch.ones(90).int()})), "holds I32, not floating-point"),
        (published(rows=400), r"bias has shape \[400\], this network's mlm_bias \[90\] \(and 1 more\)"),
        (published(positions=8), "position_embeddings.weight has shape .8, 16."),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path: Path, tensors: Tensors, text: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=text) as caught:
        load_initial(str(path), model, spec())
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_our_own_checkpoint_gives_its_weights_and_nothing_of_its_optimizer(tmp_path: Path) -> None:
    """Of phase 1, whose table of positions may be longer."""
    torch.manual_seed(4)
    before = BertForPreTraining(VOCABULARY, HIDDEN, LAYERS, HEADS, INNER, 20, dropout=0.1)
    progress = progress_at(7)
    folder = tmp_path / "checkpoints"
    for step in (5, 7):  # the newest of a run's folder is taken
        path = folder / f"step-{step:08d}.safetensors"
        write_checkpoint(path, before, torch.optim.SGD(before.parameters(), lr=1.0), progress, {})
    model = network()
    found = load_initial(str(tmp_path), model, spec())
    state = before.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name][: len(tensor)]), name
    assert "dlbench's checkpoint of step 7, without its optimizer" in found.evidence
    with pytest.raises(UserError, match=r"does not fit: mlm_bias has shape \[90\], this network's \[80\]"):
        load_initial(str(path), network(vocabulary=80), spec())
