"""What decides, beside the precision, which kernels compute: cuDNN's search, order of weights, mask, fused update."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from dlbench.errors import EnvironmentLacksError
from dlbench.node.models.build import Batch, Loss
from dlbench.node.models.optimizers import update_evidence
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import BertModel, ResNetModel, TextData

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NO_GPU = "this rank computes on a CPU: cuDNN is NVIDIA's library for GPUs"


class Kernels:
    """These choices on one rank, as a plan asks for them.

    Raises:
        EnvironmentLacksError: cuDNN is to search, and the device is none of its.
    """

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._model = plan.workload.model
        asked = plan.workload.train.cudnn_benchmark
        if device.type != "cuda" and asked == "on":
            raise EnvironmentLacksError(f"train.cudnn_benchmark on: {_NO_GPU}; leave it at auto")
        # Shapes are the same in each step, so that what is found in the first serves all.
        torch.backends.cudnn.benchmark = device.type == "cuda" and asked != "off" and self._convolves
        self._batches = {"masked": 0, "unmasked": 0, "unpadded": 0}

    @property
    def _convolves(self) -> bool:
        return not isinstance(self._model, BertModel)

    def placed(self, model: nn.Module) -> nn.Module:
        """The network on its device, its weights in the order of its activations where gradients may have it too."""
        placed = model.to(self._device)
        if self._weights == "channels-last":
            order = torch.channels_last if isinstance(self._model, ResNetModel) else torch.channels_last_3d
            placed.to(memory_format=order)  # type: ignore[call-overload]  # in place
        return placed

    @property
    def _weights(self) -> str:
        model = self._model
        return "contiguous" if isinstance(model, BertModel) or self._is_kept else model.memory_format

    @property
    def _is_kept(self) -> bool:
        """As the engine takes contiguous tensors alone."""
        return self._plan.engine.kind.contiguous_only and self._plan.layout.ranks > 1

    def counted(self, loss: Loss) -> Loss:
        """The same loss, which notes how its batches reach attention; loss itself where there is none."""
        if not isinstance(self._model, BertModel):
            return loss

        def counting(model: nn.Module, batch: Batch) -> torch.Tensor:
            how = "unpadded" if "tokens" in batch else "masked" if "attention_mask" in batch else "unmasked"
            self._batches[how] += 1
            return loss(model, batch)

        return counting

    def settings(self) -> list[Setting]:
        """What was asked for and what was in force."""
        found = []
        if self._device.type == "cuda" and self._convolves:
            is_on = torch.backends.cudnn.benchmark
            found.append(
                Setting(
                    key="train.cudnn_benchmark",
                    requested=self._plan.workload.train.cudnn_benchmark,
                    effective="on" if is_on else "off",
                    evidence=f"torch.backends.cudnn.benchmark is {is_on}",
                )
            )
        optimizer = self._plan.workload.train.optimizer
        if optimizer.implementation == "fused":
            key, how = "train.optimizer.implementation", update_evidence(optimizer)
            found.append(Setting(key=key, requested="fused", effective="fused", evidence=how))
        if not isinstance(self._model, BertModel):
            if self._model.memory_format == "channels-last":
                found.append(self._weights_setting())
        elif any(self._batches.values()):
            found.append(self._attention_setting(self._model))
        return found

    def _weights_setting(self) -> Setting:
        why = "Horovod takes contiguous tensors alone" if self._is_kept else "weights and gradients lie as activations"
        return Setting(key="model.memory_format.weights", requested=None, effective=self._weights, evidence=why)

    def _attention_setting(self, model: BertModel) -> Setting:
        batches = {name: num for name, num in self._batches.items() if num}
        told = []
        for name, num in batches.items():
            try:
                backend = attention_backend(self._plan, model, name, self._device)
            except (RuntimeError, TypeError, AttributeError) as error:
                backend = f"back-end not known: {type(error).__name__}"
            told.append(f"{num} {name} ({backend})")
        in_force: str = model.attention
        if in_force == "auto":
            in_force = "masked" if list(batches) == ["masked"] else "no mask where there is no padding"
        return Setting(
            key="model.attention",
            requested=model.attention,
            effective=in_force,
            evidence=f"forward passes by what attention was given: {', '.join(told)}",
        )


def attention_backend(plan: RunPlan, model: BertModel, how: str, device: torch.device) -> str:
    """Which of torch's attention kernels serves a batch of training, by torch's own choice for its shapes.

    Args:
        plan: gives batch, length and precision.
        model: the network.
        how: masked, unmasked or unpadded.
        device: where it computes.
    """
    train, data = plan.workload.train, plan.workload.data
    assert isinstance(data, TextData)  # the workload's validator holds this
    num = train.batch_per_rank // train.gradient_accumulation
    length, width = data.sequence_length, model.hidden_size // model.num_heads
    query = torch.empty(
        (num, length, model.num_heads, width), dtype=_TYPES.get(train.precision), device=device, requires_grad=True
    )
    if how == "unpadded":
        return _unpadded_backend(query, model.dropout)
    query = query.transpose(1, 2)
    mask = torch.ones((num, 1, 1, length), dtype=torch.bool, device=device) if how == "masked" else None
    choice = torch._fused_sdp_choice(query, query, query, attn_mask=mask, dropout_p=model.dropout)
    return _name(SDPBackend(choice))


def _unpadded_backend(query: torch.Tensor, dropout: float) -> str:
    num, length = query.shape[:2]
    if query.device.type != "cuda":
        sample = query[:1].transpose(1, 2)
        return f"{_name(SDPBackend(torch._fused_sdp_choice(sample, sample, sample, dropout_p=dropout)))}, each sample"
    from torch.nested._internal.sdpa import _select_sdp_backend

    starts = torch.arange(num + 1, dtype=torch.int32, device=query.device) * length
    nested = torch.nested.nested_tensor_from_jagged(query.flatten(0, 1), starts, min_seqlen=1, max_seqlen=length)
    nested = nested.transpose(1, 2)
    choice = _select_sdp_backend(nested, nested, nested, None, dropout, False, False)  # type: ignore[no-untyped-call]
    return f"{_name(choice)}, jagged"


def _name(backend: SDPBackend) -> str:
    return backend.name.lower().removesuffix("_attention")
