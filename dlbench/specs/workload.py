"""The workload YAML: network and data.

A network consists of a `Model` without torch, and of a `dlbench.node.models.build.Network` in the module
`Model.network`. No other module distinguishes networks.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dlbench.specs.base import (
    ActsIf,
    Bytes,
    Count,
    CountOrZero,
    Flag,
    Form,
    Fraction,
    Name,
    NonNegative,
    Positive,
    Spec,
)
from dlbench.specs.files import search_path
from dlbench.specs.layers import FLOPS_PER_MAC, TRAINING_PASSES, Layer, Layers
from dlbench.specs.system import StagingTier
from dlbench.specs.training import QualitySpec, TrainSpec

MemoryFormat = Literal["contiguous", "channels-last"]
Staging = Literal["none", "replicate", "shard", "lazy"]

Shape = tuple[int, ...]

BROKEN: dict[Path, str] = {}  # Reasons why the modules of workload files cannot be loaded.
SITE = "dlbench_workloads"  # Package of the modules in the folders of DLBENCH_PATH.

_READ = "workload.data.is_synthetic"


@dataclass(frozen=True, kw_only=True)
class MlperfRules:
    """The latest rule set of the MLPerf logging checker that includes the network."""

    usage: str
    ruleset: str
    benchmark: str
    quality_key: str  # Name of the event that logs a quality.
    init_min: int  # Maximum minutes between init_start and init_stop (open division).
    most_error: float | None = None  # Maximum error of an evaluation, if the quality is an error.

    @property
    def command(self) -> str:
        """The checker's command line, without the file."""
        return f"python -m mlperf_logging.compliance_checker --usage {self.usage} --ruleset {self.ruleset}"


class Model(Spec):
    """A network without torch: its keys are fields, `family` first; subclasses override the class variables."""

    network: ClassVar[str]  # Module with the torch part, as `NETWORK`.
    sample_unit: ClassVar[str] = "samples"  # Default name of the samples.
    formats: ClassVar[tuple[str, ...]]  # Supported data formats.
    takes_label_smoothing: ClassVar[bool] = False
    has_convolutions: ClassVar[bool] = True
    is_3d: ClassVar[bool] = False  # Whether its convolutions are 3-D.
    has_slabs: ClassVar[bool] = False  # Whether ranks can share a sample, cut along its depth.
    has_share: ClassVar[bool] = True  # Whether its quality is a share, at most 1.
    computes: ClassVar[bool] = True  # Whether its passes compute; False: they are pauses, and it learns nothing.
    mlperf: ClassVar[MlperfRules | None] = None
    epoch_samples: ClassVar[tuple[int, str] | None] = None
    """Samples per epoch of the published data set, and its name; None: nothing is published."""

    family: str

    @property
    def order(self) -> MemoryFormat:
        """The memory format of activations, and of weights if the engine allows it."""
        return getattr(self, "memory_format", "contiguous")

    @property
    def padding(self) -> Literal["masked", "auto", "unpadded"]:
        """Treatment of padding: masked always, masked only if there is some, or removed."""
        return "masked"

    @property
    def num_units(self) -> int:
        """Number of consecutive parts that a pipeline may put on different ranks; 0: it cannot be cut."""
        return 0

    def forward_macs(self, data: DataSpec) -> tuple[int, int]:
        """Returns multiply-adds of a sample's forward pass: those of the first convolution, and the others."""
        layers = self.layer_table(data)
        if not layers:
            raise NotImplementedError
        total = sum(layer.macs for layer in layers)
        if layers[0].has_gradient:
            return 0, total
        return layers[0].macs, total - layers[0].macs

    def layer_table(self, data: DataSpec) -> tuple[Layer, ...]:
        """Returns the layers in the order of the forward pass; empty if not known."""
        return ()

    def training_flops(self, data: DataSpec) -> int:
        """Returns the training FLOPs per sample; the gradient of the input is not computed."""
        first, other_macs = self.forward_macs(data)
        return FLOPS_PER_MAC * (TRAINING_PASSES * other_macs + (TRAINING_PASSES - 1) * first)

    def sample_bytes(self, data: DataSpec) -> int:
        """Returns the bytes of one sample from `dlbench.node.data`, including a mask or index arrays."""
        raise NotImplementedError

    def require(self, data: DataSpec, train: TrainSpec) -> None:
        """Raises ValueError if data or training do not fit this network."""

    def captured(self, data: DataSpec) -> Self:
        """Returns the network with settings under which a captured step has the same arguments in every replay."""
        return self

    def public_shapes(self) -> dict[str, Shape] | None:
        """Returns the shape of every parameter by name if public weights files exist; see `weights_file`."""
        return None


class ResNetModel(Model):
    """ResNet with bottleneck blocks, v1.5 (stride in the 3x3 convolution)."""

    network = "dlbench.node.models.resnet"
    sample_unit = "images"
    formats = ("images", "jpeg-tree")
    takes_label_smoothing = True
    mlperf = MlperfRules(
        usage="training", ruleset="4.0.0", benchmark="resnet", quality_key="eval_accuracy", init_min=240
    )
    epoch_samples = (1_281_167, "ImageNet-2012, as published")
    """The training images (Russakovsky et al. 2015, table 2)."""

    family: Literal["resnet"] = Field(description="Selects this network.")
    image_size: Count = Field(224, description="Height and width of the input, pixels.")
    num_classes: Count = Field(1000, description="Number of classes.")
    stage_blocks: tuple[Count, Count, Count, Count] = Field((3, 4, 6, 3), description="Blocks in the four stages.")
    base_width: Count = Field(64, description="Channels of the first stage.")
    zero_init_residual: Flag = Field(True, description="Initial scale 0 in each block's last batch norm (Goyal 2017).")
    memory_format: MemoryFormat = Field(
        "contiguous",
        description="Memory format of activations and weights: contiguous (NCHW) or channels-last (NHWC). Weights stay "
        "contiguous where Horovod or FSDP exchanges.",
    )

    def layer_table(self, data: DataSpec) -> tuple[Layer, ...]:
        """Returns the layers; a bottleneck is a block with 4 times the channels of its inner convolutions."""
        layers = Layers()

        def normed(name: str, channels: int, filters: int, edge: int, kernel: int, stride: int = 1) -> int:
            conv, norm = name.split()
            (edge, _) = layers.conv(conv, channels, filters, (edge, edge), kernel, stride)
            layers.other(norm, "norm", filters * edge**2, weights=2 * filters, extents=(edge, edge))
            return edge

        channels = self.base_width
        edge = normed("stem_conv stem_norm", 3, channels, self.image_size, 7, 2)
        layers.other("stem_activation", "activation", channels * edge**2, extents=(edge, edge))
        square, edge = (edge, edge), -(-edge // 2)
        pooled = channels * edge**2
        layers.other("stem_pool", "pool", channels * square[0] ** 2, pooled, extents=square, kernel=3, stride=2)
        for stage, blocks in enumerate(self.stage_blocks):
            width = self.base_width * 2**stage
            for number in range(blocks):
                layers.block += 1
                name = f"stages.{stage}.{number}"
                stride = 2 if number == 0 and stage > 0 else 1
                normed(f"{name}.conv1 {name}.norm1", channels, width, edge, 1)
                inner = normed(f"{name}.conv2 {name}.norm2", width, width, edge, 3, stride)  # v1.5: the stride is here
                normed(f"{name}.conv3 {name}.norm3", width, width * 4, inner, 1)
                if number == 0:
                    normed(f"{name}.shortcut.0 {name}.shortcut.1", channels, width * 4, edge, 1, stride)
                channels, edge = width * 4, inner
        layers.block += 1
        layers.other("mean", "pool", channels * edge**2, channels)
        layers.linear("classifier", channels, self.num_classes)
        return tuple(layers)

    def sample_bytes(self, data: DataSpec) -> int:
        return 3 * self.image_size**2 + 8


class BertModel(Model):
    """BERT with both pre-training heads (masked LM, next sentence)."""

    acting = (ActsIf("attention", "has_padding", why="synthetic text has no padding"),)
    network = "dlbench.node.models.bert"
    sample_unit = "sequences"
    formats = ("text",)
    has_convolutions = False
    mlperf = MlperfRules(usage="training", ruleset="5.0.0", benchmark="bert", quality_key="eval_accuracy", init_min=240)
    # No epoch_samples: MLPerf counts its training in samples.

    family: Literal["bert"] = Field(description="Selects this network.")
    vocab_size: Count = Field(30522, description="Entries of the WordPiece vocabulary.")
    hidden_size: Count = Field(1024, description="Width of a layer.")
    num_layers: Count = Field(24, description="Transformer layers.")
    num_heads: Count = Field(16, description="Attention heads; must divide hidden_size.")
    intermediate_size: Count = Field(4096, description="Width of the feed-forward part.")
    max_positions: Count = Field(512, description="Longest sequence, tokens.")
    type_vocab_size: Count = Field(2, description="Segment types.")
    dropout: Fraction = Field(0.1, description="Dropout probability.")
    attention: Literal["auto", "masked", "unpadded"] = Field(
        "auto",
        description="auto: no mask if a batch has no padding, so that flash attention can be used. masked: always with "
        "a mask. unpadded: padding is removed from all layers.",
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        return self

    @property
    def padding(self) -> Literal["masked", "auto", "unpadded"]:
        return self.attention

    @property
    def num_units(self) -> int:
        return self.num_layers + 2  # with embedding and heads

    def layer_table(self, data: DataSpec) -> tuple[Layer, ...]:
        """Returns the layers; an encoder layer is a block; the masked-LM head computes max_predictions positions."""
        assert isinstance(data, TextData)  # `formats` holds that
        layers, hidden, tokens = Layers(), self.hidden_size, data.sequence_length
        width = tokens * hidden
        for name, size in (("word", self.vocab_size), ("position", self.max_positions), ("type", self.type_vocab_size)):
            layers.other(f"{name}_embedding", "embedding", tokens, width, weights=size * hidden)
        layers.other("embedding_norm", "norm", width, weights=2 * hidden)
        for number in range(self.num_layers):
            layers.block += 1
            name = f"layers.{number}"
            for part in ("query", "key", "value"):
                layers.linear(f"{name}.attention.{part}", hidden, hidden, tokens, tensor="column")
            layers.linear(f"{name}.attention.output", hidden, hidden, tokens, tensor="row")
            # Scores read queries and keys, the mixture reads values; scores stay in the kernel.
            by_head: dict[str, Any] = {"macs": tokens * width, "heads": self.num_heads, "tensor": "head"}
            layers.other(f"{name}.attention.scores", "attention", 2 * width, 0, **by_head)
            layers.other(f"{name}.attention.mixture", "attention", width, **by_head)
            layers.other(f"{name}.attention_norm", "norm", width, weights=2 * hidden)
            layers.linear(f"{name}.expand", hidden, self.intermediate_size, tokens, tensor="column")
            layers.linear(f"{name}.reduce", self.intermediate_size, hidden, tokens, tensor="row")
            layers.other(f"{name}.output_norm", "norm", width, weights=2 * hidden)
        layers.block += 1
        places = data.max_predictions
        layers.linear("mlm_transform", hidden, hidden, places)
        layers.other("mlm_norm", "norm", places * hidden, weights=2 * hidden)
        layers.linear("pooler", hidden, hidden)
        layers.linear("nsp_classifier", hidden, 2)
        layers.linear("mlm_decoder", hidden, self.vocab_size, places, tied=True)
        return tuple(layers)

    def sample_bytes(self, data: DataSpec) -> int:
        assert isinstance(data, TextData)  # `formats` holds that
        num_bytes = 3 * 8 * data.sequence_length + (8 + 8 + 4) * data.max_predictions + 8
        if self.attention == "unpadded":
            num_bytes += 8 * data.max_predictions + 2 * 4
        return num_bytes

    def require(self, data: DataSpec, train: TrainSpec) -> None:
        assert isinstance(data, TextData)  # `formats` holds that
        length, limit = data.sequence_length, self.max_positions
        if length > limit:
            raise ValueError(f"data.sequence_length {length} is longer than model.max_positions {limit}")
        for key in ("compile", "cuda_graphs", "recompute", "swap"):
            value = getattr(train, key)
            if value != "none" and self.attention == "unpadded":
                raise ValueError(
                    f"model.attention unpadded and train.{key} {value} exclude each other: without padding the shapes "
                    "change in every step"
                )
        if self.attention == "auto" and not data.is_synthetic and train.cuda_graphs != "none":
            raise ValueError(
                "train.cuda_graphs network needs the same inputs in every step, but with model.attention auto some "
                "batches have no mask: set it to masked"
            )

    def captured(self, data: DataSpec) -> Self:
        if self.attention != "auto" or data.is_synthetic:
            return self
        # Otherwise some batches would have a mask and some would not.
        return self.model_copy(update={"attention": "masked"})

    def public_shapes(self) -> dict[str, Shape]:
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, Shape] = {
            "word_embedding.weight": (self.vocab_size, hidden),
            "position_embedding.weight": (self.max_positions, hidden),
            "type_embedding.weight": (self.type_vocab_size, hidden),
            "mlm_bias": (self.vocab_size,),
        }
        linears = {"pooler": (hidden, hidden), "mlm_transform": (hidden, hidden), "nsp_classifier": (2, hidden)}
        norms = ["embedding_norm", "mlm_norm"]
        for number in range(self.num_layers):
            layer = f"layers.{number}"
            linears |= {f"{layer}.attention.{part}": (hidden, hidden) for part in ("query", "key", "value", "output")}
            linears |= {f"{layer}.expand": (inner, hidden), f"{layer}.reduce": (hidden, inner)}
            norms += [f"{layer}.attention_norm", f"{layer}.output_norm"]
        for name, shape in linears.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        for name in norms:
            shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
        return shapes


class CosmoFlowModel(Model):
    """CosmoFlow: 3-D convolutions that regress cosmological parameters."""

    network = "dlbench.node.models.cosmoflow"
    sample_unit = "volumes"
    formats = ("density", "hdf5-density")
    is_3d = True
    has_slabs = True
    has_share = False
    mlperf = MlperfRules(
        usage="hpc", ruleset="3.0.0", benchmark="cosmoflow", quality_key="eval_error", init_min=30, most_error=0.124
    )
    epoch_samples = (524_288, "cosmoUniverse of MLPerf HPC, as published")  # The training set since v1.0.

    family: Literal["cosmoflow"] = Field(description="Selects this network.")
    input_size: Count = Field(128, description="Edge length of the cubic input, voxels; halved after each convolution.")
    input_channels: Count = Field(4, description="Density maps per sample.")
    conv_channels: tuple[Count, ...] = Field((32, 64, 128, 256, 512), description="Channels of each convolution.")
    dense_sizes: tuple[Count, ...] = Field((128, 64), description="Widths of the hidden dense layers.")
    dropout: Fraction = Field(0.5, description="Dropout probability after each hidden dense layer.")
    num_targets: Count = Field(4, description="Number of regressed parameters.")
    memory_format: MemoryFormat = Field(
        "contiguous",
        description="Memory format of activations and weights: contiguous (NCDHW) or channels-last (NDHWC). Weights "
        "stay contiguous where Horovod or FSDP exchanges.",
    )

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        factor = 2 ** len(self.conv_channels)
        if self.input_size % factor:
            raise ValueError(f"input_size {self.input_size} is not a multiple of {factor} (one halving a convolution)")
        return self

    def layer_table(self, data: DataSpec) -> tuple[Layer, ...]:
        """Returns the layers; a convolution with its pooling is a block, and so is each dense layer."""
        layers, edge, channels = Layers(), self.input_size, self.input_channels
        for number, filters in enumerate(self.conv_channels):
            cube, elements = (edge,) * 3, filters * edge**3
            layers.block, first = number, 3 * number
            layers.conv(f"features.{first}", channels, filters, cube, 3, bias=True)
            layers.other(f"features.{first + 1}", "activation", elements, extents=cube)
            layers.other(f"features.{first + 2}", "pool", elements, elements // 8, extents=cube, kernel=2, stride=2)
            edge, channels = edge // 2, filters
        widths = (channels * edge**3, *self.dense_sizes, self.num_targets)
        for number, (before, after) in enumerate(itertools.pairwise(widths)):
            layers.block = len(self.conv_channels) + number
            layers.linear(f"regressor.{3 * number + 1}", before, after)
            if number < len(self.dense_sizes):
                layers.other(f"regressor.{3 * number + 2}", "activation", after)
        return tuple(layers)

    def sample_bytes(self, data: DataSpec) -> int:
        return 4 * self.input_channels * self.input_size**3 + 4 * self.num_targets


class PacedLayer(Spec):
    """A layer of a paced network: the size of its gradient and the duration of its passes."""

    bytes: Bytes = Field(description="Size of its fp32 gradient, bytes: a multiple of 4.")
    forward_s: NonNegative = Field(description="Duration of its forward pass, seconds per sample.")
    backward_s: NonNegative = Field(description="Duration of its backward pass, seconds per sample.")


class PacedModel(Model):
    """A rehearsal of a network without GPUs: passes are pauses, but gradients are real tensors that are exchanged."""

    network = "dlbench.node.models.paced"
    formats = ("none",)
    has_convolutions = False
    has_share = False
    computes = False

    family: Literal["paced"] = Field(description="Selects this network.")
    layers: tuple[PacedLayer, ...] = Field((), description="The layers, in the order of the forward pass.")
    layers_from: str | None = Field(
        None,
        min_length=1,
        description="Run folder, or its record.json, whose gradients and times replace layers; in a plan the run's "
        "name.",
    )
    speed: Positive = Field(1.0, description="Factor by which passes are faster than the times of the layers.")
    rank_jitter: Fraction = Field(0.0, description="Standard deviation of the log of each rank's speed factor.")
    step_jitter: Fraction = Field(0.0, description="Standard deviation of the log of a speed factor per rank and step.")

    def forward_macs(self, data: DataSpec) -> tuple[int, int]:
        return 0, 0

    def sample_bytes(self, data: DataSpec) -> int:
        """Returns the bytes of a pace and a target, both fp32."""
        return 4 + 4

    def require(self, data: DataSpec, train: TrainSpec) -> None:
        if not self.layers and self.layers_from is None:
            raise ValueError("model.layers: is empty; give layers, or set model.layers_from to the folder of a run")
        for number, layer in enumerate(self.layers):
            if layer.bytes % 4:
                raise ValueError(f"model.layers.{number}.bytes {layer.bytes} is not a number of fp32 values of 4 bytes")
        if not data.is_synthetic:
            raise ValueError("data.source: a paced network reads no data; set it to synthetic")
        required = {"precision": "fp32", "optimizer_state": "device"}
        for key in ("precision", "compile", "cuda_graphs", "recompute", "swap", "optimizer_state"):
            if (value := getattr(train, key)) != required.get(key, "none"):
                raise ValueError(
                    f"train.{key} {value}: has no effect on a paced network, which computes nothing; set it to "
                    f"{required.get(key, 'none')}"
                )


class _Data(Spec):
    acting = (
        ActsIf(
            "loader_workers prefetch_batches staging staging_tier staging_streams keep_staged shuffle partition cache",
            _READ,
            False,
            why="synthetic data has no reader",
        ),
        ActsIf(
            "prefetch_batches",
            "workload.data.loader_workers",
            why="data.loader_workers is 0: the training process reads each batch when it is needed",
        ),
        ActsIf("decode", "decodes_images", why="only images from files are decoded"),
        ActsIf(
            "staging_tier staging_streams keep_staged",
            "workload.data.staging",
            "replicate",
            "shard",
            "lazy",
            why="data.staging is none",
        ),
        ActsIf("partition", "workload.data.holds_samples", why="with data.shuffle global no rank has its own samples"),
        ActsIf("on_bad_sample", _READ, False, why="synthetic data has no reader"),
        ActsIf("vocabulary", _READ, False, why="synthetic data has no text"),
        ActsIf("synthetic_on", _READ, True, why="data is read from files"),
        ActsIf("validation", "measure.until", "quality", why="only measure.until quality evaluates"),
    )

    kinds: ClassVar[tuple[str, ...]]  # Kinds in `dlbench.datasets.recognition.KINDS` that this data may be.

    source: str = Field("synthetic", min_length=1, description="Path of the data set, or synthetic: random tensors.")
    synthetic_on: Literal["host", "device"] = Field(
        "host", description="Memory of synthetic samples: host (copied in each step) or device (GPU memory, no copy)."
    )
    reader: Literal["dlbench", "nvimagecodec"] = Field(
        "dlbench",
        description="Decoder of training samples. dlbench: on CPUs. nvimagecodec: images are decoded on the GPU by "
        "NVIDIA's nvImageCodec, with the same order, crops and flips.",
    )
    decode: Literal["region", "full"] = Field(
        "region",
        description="region: decode only the cropped part of a training image (after `dlbench setup images`), at the "
        "smallest sufficient scale (nvimagecodec: the crop alone). full: decode the whole image.",
    )
    device_prefetch: CountOrZero = Field(1, description="Batches copied to the GPU ahead, on a stream; 0: in the step.")
    validation: str | None = Field(
        None,
        min_length=1,
        description="Validation data; none: the folder `validation`, `val` or `valid` next to `train`.",
    )
    loader_workers: CountOrZero | Literal["auto"] = Field(
        0, description="Reader processes per rank; 0: the training process reads; auto: chosen by measuring."
    )
    prefetch_batches: Count | Literal["auto"] = Field(2, description="Batches read ahead per process; auto: measured.")
    staging: Staging = Field(
        "none",
        description="Copying of samples to the nodes before training. none: no copy. replicate: the whole data set to "
        "each node. shard: each rank's samples to its node. lazy: samples are kept when first read, and never evicted.",
    )
    staging_tier: StagingTier = Field("local", description="Destination of staging: a tier in `system.storage`.")
    staging_streams: Count = Field(4, description="Number of files or samples that a node copies at the same time.")
    keep_staged: Flag = Field(False, description="Keep staged samples for the next run.")
    shuffle: Annotated[
        str, Field(pattern=r"^(global|local|partial:.+)$"), Form("global, local or partial:Q, e.g. partial:0.1")
    ] = Field(
        "global",
        description="global: a new permutation of the whole data set over all ranks in each epoch. local: each rank "
        "permutes its own samples. partial:Q: as local, and each rank exchanges the share Q of its samples in each "
        "epoch.",
    )
    partition: Literal["shuffled", "contiguous"] = Field(
        "shuffled",
        description="First samples of a rank with local and partial shuffling. shuffled: drawn from all samples. "
        "contiguous: its part of the data set in storage order.",
    )
    cache: Literal["any", "cold", "warm"] = Field(
        "any",
        description="Page cache when training begins. any: unchanged. cold: without the data set. warm: with the data "
        "set.",
    )
    on_bad_sample: Literal["stop", "skip"] = Field("stop", description="Reaction to an unreadable sample.")

    @property
    def is_synthetic(self) -> bool:
        return self.source == "synthetic"

    @property
    def holds_samples(self) -> bool:
        return self.shuffle != "global"

    @property
    def exchanged_share(self) -> float:
        """The share of its samples that a rank exchanges per epoch: Q of partial, 0 for local, 1 for global."""
        if self.shuffle.startswith("partial:"):
            return float(self.shuffle.removeprefix("partial:"))
        return 1.0 if self.shuffle == "global" else 0.0

    def keeps_voxel_counts(self, *, on_gpu: bool) -> bool:
        """Returns whether volumes are sent to the device as stored (integer counts)."""
        return on_gpu

    @model_validator(mode="after")
    def _reader_and_shuffling_fit(self) -> Self:
        if self.reader == "nvimagecodec" and (self.is_synthetic or not isinstance(self, ImageData)):
            source = "synthetic data" if self.is_synthetic else "this format"
            raise ValueError(f"reader nvimagecodec decodes images, and {source} has none; set reader to dlbench")
        if self.shuffle.startswith("partial:"):
            try:
                share = self.exchanged_share
            except ValueError:
                share = math.nan
            if not 0 <= share <= 1:
                raise ValueError(f"shuffle {self.shuffle!r}: Q must be a share from 0 to 1, e.g. partial:0.1")
            if self.staging != "shard" and not self.is_synthetic:
                raise ValueError(f"shuffle {self.shuffle}: ranks exchange their own samples; set staging to shard")
        if self.shuffle == "global" and self.staging == "shard":
            raise ValueError(
                "staging shard stores the samples of a node's ranks, but shuffle global changes these in each epoch; "
                "set shuffle to local or partial:Q, or staging to replicate or lazy"
            )
        return self


class ImageData(_Data):
    """JPEG images of classes: a folder per class, or shards (tar, TFRecord)."""

    kinds = ("images", "image-shards")

    format: Literal["images", "jpeg-tree"] = Field(description="Selects this kind of data; jpeg-tree: its old name.")


class TextData(_Data):
    """Raw text that is masked during training, or samples prepared in HDF5."""

    kinds = ("text", "samples")

    format: Literal["text"] = Field(description="Selects this kind of data.")
    sequence_length: Count = Field(512, description="Tokens per sample.")
    max_predictions: Count = Field(76, description="Maximum number of masked positions per sample.")
    masked_lm_probability: Fraction = Field(0.15, description="Share of tokens chosen for prediction.")
    vocabulary: str = Field("english-4096", description="WordPiece vocabulary: a path or the name of a bundled one.")


class DensityData(_Data):
    """Density volumes (x, int16) and parameters (y, float32) in TFRecord, HDF5 or npy files."""

    kinds = ("density",)

    format: Literal["density", "hdf5-density"] = Field(description="Selects this data; hdf5-density: its old name.")
    volumes: Literal["auto", "float32", "int16"] = Field(
        "auto",
        description="Type of the volumes sent to the device. float32: the logarithm of the counts. int16: the counts, "
        "whose logarithm is computed on the device. auto: int16 on GPUs.",
    )

    def keeps_voxel_counts(self, *, on_gpu: bool) -> bool:
        return on_gpu if self.volumes == "auto" else self.volumes == "int16"


class NoData(_Data):
    """No data, for networks that train only on generated batches, or whose passes are pauses."""

    kinds: ClassVar[tuple[str, ...]] = ()

    format: Literal["none"] = Field(description="Selects no data.")


DataSpec = Annotated[ImageData | TextData | DensityData | NoData, Field(discriminator="format")]


def _of_this_site() -> Iterator[type[Model]]:
    """Yields networks of DLBENCH_PATH: Python modules next to a workload file of the same name."""
    folders = search_path("workloads")[:-1]
    package = types.ModuleType(SITE)
    package.__path__ = [str(folder) for folder in folders]
    sys.modules[SITE] = package
    paths = itertools.chain.from_iterable(sorted(folder.glob("*.py")) for folder in folders)
    for path in paths:
        if not path.with_suffix(".yaml").is_file():
            continue
        try:
            with contextlib.redirect_stdout(sys.stderr):  # its prints must not mix with a command's output
                module = importlib.import_module(f"{SITE}.{path.stem}")
        except (Exception, SystemExit) as error:  # the module may raise anything
            BROKEN[path.with_suffix(".yaml")] = f"{path}: cannot be loaded: {type(error).__name__}: {error}"
            continue
        classes = [member for member in vars(module).values() if isinstance(member, type)]
        yield from (cls for cls in classes if issubclass(cls, Model) and cls.__module__ == module.__name__)


FAMILIES: tuple[type[Model], ...] = (ResNetModel, BertModel, CosmoFlowModel, PacedModel, *_of_this_site())
"""Every network; a new one is registered here."""

if TYPE_CHECKING:
    ModelSpec = Model
else:
    ModelSpec = Annotated[reduce(or_, FAMILIES), Field(discriminator="family")]


class Workload(Spec):
    """One preset of one workload, with all values set."""

    name: Name = Field(description="Name of the workload, as in its file name.")
    title: str = Field(description="Description of the workload in words.")
    sample_unit: str = Field(description="Name of the samples: images, sequences, volumes.")
    preset: Name = Field(description="Name of the preset.")
    about: str = Field(description="Differences of the preset from the published configuration.")
    notice: str = Field(description="How results may be named when published.")
    meant_for: Literal["any", "gpu"] = Field("any", description="Machines of the preset; gpu: refused without GPUs.")
    model: ModelSpec = Field(description="The network.")
    data: DataSpec = Field(description="The training data.")
    train: TrainSpec = Field(description="The training recipe.")
    quality: QualitySpec | None = Field(None, description="Target quality of training to accuracy.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.data.format not in self.model.formats:
            raise ValueError(f"data.format {self.data.format!r} does not fit model.family {self.model.family!r}")
        if self.train.label_smoothing and not self.model.takes_label_smoothing:
            raise ValueError(f"train.label_smoothing has no effect on model.family {self.model.family!r}")
        if self.quality is not None and not self.model.computes:
            raise ValueError(f"quality: model.family {self.model.family!r} learns nothing; leave out this section")
        self.model.require(self.data, self.train)
        schedule = self.train.schedule
        if self.data.is_synthetic and schedule.counts_epochs and schedule.epoch_samples is None:
            raise ValueError("train.schedule is in epochs, but synthetic data has none: set its epoch_samples")
        if self.quality is not None and self.model.has_share and self.quality.target > 1:
            raise ValueError(f"quality.target {self.quality.target} is above 1, but accuracies are shares, e.g. 0.759")
        return self
