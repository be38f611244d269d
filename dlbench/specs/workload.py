"""What is trained: network and data. One `Workload` is one preset of one workload YAML, decided."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dlbench.specs.base import Count, CountOrZero, Flag, Form, Fraction, Name, Spec
from dlbench.specs.system import StagingTier
from dlbench.specs.training import QualitySpec, TrainSpec

MemoryFormat = Literal["contiguous", "channels-last"]
Staging = Literal["none", "replicate", "shard", "lazy"]


class ResNetModel(Spec):
    """ResNet with bottleneck blocks, v1.5 (stride in the 3x3 convolution)."""

    family: Literal["resnet"] = Field(description="Chooses this network.")
    image_size: Count = Field(224, description="Height and width of the input, pixels.")
    num_classes: Count = Field(1000, description="Classes of the classifier.")
    stage_blocks: tuple[Count, Count, Count, Count] = Field((3, 4, 6, 3), description="Blocks in the four stages.")
    base_width: Count = Field(64, description="Channels of the first stage.")
    zero_init_residual: Flag = Field(True, description="Start each block's last batch-norm scale at 0 (Goyal 2017).")
    memory_format: MemoryFormat = Field(
        "contiguous",
        description="Order of activations, and of weights where Horovod does not exchange: contiguous (NCHW) or "
        "channels-last (NHWC).",
    )


class BertModel(Spec):
    """BERT with both pre-training heads (masked LM, next sentence)."""

    family: Literal["bert"] = Field(description="Chooses this network.")
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
        description="auto: without a mask where a batch has no padding, so that flash attention may act; masked: with "
        "a mask always; unpadded: padding is left out of all layers.",
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        return self


class CosmoFlowModel(Spec):
    """CosmoFlow: 3-D convolutions that regress cosmological parameters."""

    family: Literal["cosmoflow"] = Field(description="Chooses this network.")
    input_size: Count = Field(128, description="Edge of the cubic input, voxels; halved once per convolution.")
    input_channels: Count = Field(4, description="Density maps per sample.")
    conv_channels: tuple[Count, ...] = Field((32, 64, 128, 256, 512), description="Channels of each convolution.")
    dense_sizes: tuple[Count, ...] = Field((128, 64), description="Widths of the hidden dense layers.")
    dropout: Fraction = Field(0.5, description="Dropout probability behind each hidden dense layer.")
    num_targets: Count = Field(4, description="Regressed parameters.")
    memory_format: MemoryFormat = Field(
        "contiguous",
        description="Order of activations, and of weights where Horovod does not exchange: contiguous (NCDHW) or "
        "channels-last (NDHWC).",
    )

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        factor = 2 ** len(self.conv_channels)
        if self.input_size % factor:
            raise ValueError(f"input_size {self.input_size} is not a multiple of {factor} (one halving a convolution)")
        return self


ModelSpec = Annotated[ResNetModel | BertModel | CosmoFlowModel, Field(discriminator="family")]


class _Data(Spec):
    source: str = Field("synthetic", min_length=1, description="'synthetic' (tensors in memory) or a path.")
    synthetic_on: Literal["host", "device"] = Field(
        "host",
        description="Where synthetic samples lie: host (copied in each step) or device (a GPU's memory; no copy).",
    )
    reader: Literal["dlbench", "nvimagecodec"] = Field(
        "dlbench",
        description="What decodes samples of training: dlbench's reader, on CPUs; or, for images, NVIDIA's "
        "nvImageCodec, on the GPU, with the same order, crops and flips.",
    )
    decode: Literal["region", "full"] = Field(
        "region",
        description="Images in training. region: without the rows below the crop, and at the smallest scale that is "
        "enough (nvimagecodec: the crop alone); full: whole.",
    )
    device_prefetch: CountOrZero = Field(
        1, description="Batches copied to the GPU ahead on a stream of its own; 0: copied in the step."
    )
    validation: str | None = Field(
        None,
        min_length=1,
        description="Data of evaluations, a path; none: `validation`, `val` or `valid` beside `train`.",
    )
    loader_workers: CountOrZero | Literal["auto"] = Field(
        0, description="Reader processes per rank; 0 reads in the training process; auto: measured before training."
    )
    prefetch_batches: Count | Literal["auto"] = Field(
        2, description="Batches that each reader process reads ahead; auto: measured before training."
    )
    staging: Staging = Field(
        "none",
        description="Before training, samples are copied to the node: none; replicate (the whole set to each node); "
        "shard (each rank's samples to its node); lazy (kept when first read, never evicted).",
    )
    staging_tier: StagingTier = Field("local", description="Where to: a tier of the system file's `storage`.")
    staging_streams: Count = Field(4, description="Files or samples that a node copies at the same time.")
    keep_staged: Flag = Field(False, description="Leave what was staged for the next run.")
    shuffle: Annotated[
        str, Field(pattern=r"^(global|local|partial:.+)$"), Form("global, local or partial:Q, e.g. partial:0.1")
    ] = Field(
        "global",
        description="global: a new permutation of the whole data set each epoch, over all ranks. local: each rank "
        "permutes the samples that it holds. partial:Q: each epoch each rank exchanges the share Q of them.",
    )
    partition: Literal["shuffled", "contiguous"] = Field(
        "shuffled",
        description="Which samples a rank holds first, under local and partial shuffling: drawn from all, or its part "
        "of the data set in the order of storage.",
    )
    cache: Literal["any", "cold", "warm"] = Field(
        "any",
        description="Page cache when training begins: as it is, emptied of the data set, or filled with it.",
    )
    on_bad_sample: Literal["stop", "skip"] = Field("stop", description="What an unreadable sample does to the run.")

    @property
    def is_synthetic(self) -> bool:
        """Whether no file is read."""
        return self.source == "synthetic"

    @property
    def exchanged_share(self) -> float:
        """Q of partial shuffling: the share of its samples that a rank exchanges per epoch; 0 under local, 1 global."""
        if self.shuffle.startswith("partial:"):
            return float(self.shuffle.removeprefix("partial:"))
        return 1.0 if self.shuffle == "global" else 0.0

    @model_validator(mode="after")
    def _reader_fits_data(self) -> Self:
        if self.reader == "nvimagecodec" and (self.is_synthetic or not isinstance(self, ImageData)):
            what = "synthetic data" if self.is_synthetic else "this format"
            raise ValueError(f"reader nvimagecodec decodes images, and {what} has none; leave reader at dlbench")
        return self

    @model_validator(mode="after")
    def _shuffling_fits_staging(self) -> Self:
        if self.shuffle.startswith("partial:"):
            try:
                share = self.exchanged_share
            except ValueError:
                share = math.nan
            if not 0 <= share <= 1:
                raise ValueError(f"shuffle {self.shuffle!r}: Q is a share from 0 to 1, e.g. partial:0.1")
            if self.staging != "shard" and not self.is_synthetic:
                raise ValueError(
                    f"shuffle {self.shuffle}: ranks exchange samples that they hold themselves; set staging to shard"
                )
        if self.shuffle == "global" and self.staging == "shard":
            raise ValueError(
                "staging shard keeps on a node the samples of its own ranks, and shuffle global gives them others each "
                "epoch; set shuffle to local or partial:Q, or staging to replicate or lazy"
            )
        return self


class ImageData(_Data):
    """JPEGs of classes: a folder a class, or shards (tar, TFRecord)."""

    format: Literal["images", "jpeg-tree"] = Field(description="Chooses this kind of data; jpeg-tree: its old name.")


class TextData(_Data):
    """Raw text, masked on the fly, or samples prepared in HDF5."""

    format: Literal["text"] = Field(description="Chooses this kind of data.")
    sequence_length: Count = Field(512, description="Tokens of one sample.")
    max_predictions: Count = Field(76, description="Masked positions of one sample at most.")
    masked_lm_probability: Fraction = Field(0.15, description="Share of tokens chosen for prediction.")
    vocabulary: str = Field("english-4096", description="WordPiece vocabulary: a path or the name of a bundled one.")


class DensityData(_Data):
    """Density volumes (x, int16) and parameters (y, float32) in TFRecord, HDF5 or npy files."""

    format: Literal["density", "hdf5-density"] = Field(
        description="Chooses this kind of data; hdf5-density: its old name."
    )


DataSpec = Annotated[ImageData | TextData | DensityData, Field(discriminator="format")]


class Workload(Spec):
    """One preset of one workload, decided."""

    name: Name = Field(description="Name of the workload, as in its file name.")
    title: str = Field(description="What it trains, in words.")
    sample_unit: str = Field(description="What one sample is called: images, sequences, volumes.")
    preset: Name = Field(description="Name of the preset.")
    about: str = Field(description="What the preset changes against the published configuration.")
    notice: str = Field(description="How results may be called.")
    meant_for: Literal["any", "gpu"] = Field(
        "any", description="Machines that the preset is made for; gpu: refused where there is none."
    )
    model: ModelSpec = Field(description="The network.")
    data: DataSpec = Field(description="What it is trained on.")
    train: TrainSpec = Field(description="How it is trained.")
    quality: QualitySpec | None = Field(None, description="What training is for.")

    @model_validator(mode="after")
    def _data_fits_model(self) -> Self:
        fitting = {"resnet": ("images", "jpeg-tree"), "bert": ("text",), "cosmoflow": ("density", "hdf5-density")}
        if self.data.format not in fitting[self.model.family]:
            raise ValueError(f"data.format {self.data.format!r} does not fit model.family {self.model.family!r}")
        if (
            isinstance(self.model, BertModel)
            and isinstance(self.data, TextData)
            and self.data.sequence_length > self.model.max_positions
        ):
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is longer than "
                f"model.max_positions {self.model.max_positions}"
            )
        if self.train.label_smoothing and self.model.family != "resnet":
            raise ValueError(f"train.label_smoothing has no effect on model.family {self.model.family!r}")
        return self

    @model_validator(mode="after")
    def _lengths_may_differ(self) -> Self:
        train = self.train
        if not isinstance(self.model, BertModel) or self.model.attention != "unpadded":
            return self
        for key in ("compile", "cuda_graphs", "recompute", "swap"):
            value = getattr(train, key)
            if value != "none":
                raise ValueError(
                    f"model.attention unpadded and train.{key} {value} exclude each other: without padding every step "
                    "has another shape"
                )
        return self

    @model_validator(mode="after")
    def _inputs_are_alike(self) -> Self:
        is_auto = isinstance(self.model, BertModel) and self.model.attention == "auto"
        if is_auto and not self.data.is_synthetic and self.train.cuda_graphs != "none":
            raise ValueError(
                "train.cuda_graphs network needs the same inputs in every step, and model.attention auto leaves the "
                "mask of some away: set it to masked"
            )
        return self

    @model_validator(mode="after")
    def _epochs_are_known(self) -> Self:
        schedule = self.train.schedule
        if self.data.is_synthetic and schedule.counts_epochs and schedule.epoch_samples is None:
            raise ValueError(
                "train.schedule is in epochs, but synthetic data has none: give train.schedule.epoch_samples"
            )
        if self.quality is not None and self.model.family != "cosmoflow" and self.quality.target > 1:
            raise ValueError(f"quality.target {self.quality.target} is above 1, but accuracies are shares, e.g. 0.759")
        return self
