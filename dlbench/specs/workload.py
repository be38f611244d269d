"""What is trained: network, data, optimiser, batch, steps. One `Workload` is one preset of one workload YAML."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from dlbench.specs.base import Count, CountOrZero, Flag, Fraction, Name, NonNegative, Positive, Spec


class ResNetModel(Spec):
    """ResNet with bottleneck blocks, v1.5 (stride in the 3x3 convolution)."""

    family: Literal["resnet"] = Field(description="Chooses this network.")
    image_size: Count = Field(224, description="Height and width of the input, pixels.")
    num_classes: Count = Field(1000, description="Classes of the classifier.")
    stage_blocks: tuple[Count, Count, Count, Count] = Field((3, 4, 6, 3), description="Blocks in the four stages.")
    base_width: Count = Field(64, description="Channels of the first stage.")
    zero_init_residual: Flag = Field(True, description="Start each block's last batch-norm scale at 0 (Goyal 2017).")


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

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        factor = 2 ** len(self.conv_channels)
        if self.input_size % factor:
            raise ValueError(f"input_size {self.input_size} is not a multiple of {factor} (one halving a convolution)")
        return self


ModelSpec = Annotated[ResNetModel | BertModel | CosmoFlowModel, Field(discriminator="family")]


class _Data(Spec):
    source: str = Field("synthetic", min_length=1, description="'synthetic' (tensors in memory) or a path.")
    loader_workers: CountOrZero = Field(0, description="Reader processes a rank; 0 reads in the training process.")
    on_bad_sample: Literal["stop", "skip"] = Field("stop", description="What an unreadable sample does to the run.")

    @property
    def is_synthetic(self) -> bool:
        """Whether no file is read."""
        return self.source == "synthetic"


class JpegTreeData(_Data):
    """One folder per class, JPEG files inside."""

    format: Literal["jpeg-tree"] = Field(description="Chooses this kind of data.")


class TextData(_Data):
    """Raw text, documents separated by blank lines; masked on the fly."""

    format: Literal["text"] = Field(description="Chooses this kind of data.")
    sequence_length: Count = Field(512, description="Tokens of one sample.")
    max_predictions: Count = Field(76, description="Masked positions of one sample at most.")
    masked_lm_probability: Fraction = Field(0.15, description="Share of tokens chosen for prediction.")
    vocabulary: str = Field("english-4096", description="WordPiece vocabulary: a path or the name of a bundled one.")


class DensityData(_Data):
    """HDF5 files of density volumes (x, int16) and parameters (y, float32)."""

    format: Literal["hdf5-density"] = Field(description="Chooses this kind of data.")


DataSpec = Annotated[JpegTreeData | TextData | DensityData, Field(discriminator="format")]


class OptimizerSpec(Spec):
    """The optimiser; formulas in `dlbench.node.models.optimizers`."""

    name: Literal["sgd", "lars", "lamb"] = Field(description="Update rule.")
    learning_rate: Positive = Field(description="Peak learning rate, after warm-up.")
    momentum: Fraction = Field(0.9, description="Momentum (sgd, lars).")
    weight_decay: NonNegative = Field(0.0, description="Decay of weights; biases and norms are left out.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="Decay of the two moments (lamb).")
    epsilon: NonNegative = Field(1e-6, description="Added to the denominator (lars, lamb).")
    trust_coefficient: Positive = Field(0.001, description="LARS's eta.")
    clip_norm: Positive | None = Field(None, description="Bound of the global gradient norm, after the exchange.")


class ScheduleSpec(Spec):
    """Learning rate over steps: linear warm-up, then a decay."""

    warmup_steps: CountOrZero = Field(0, description="Steps of linear warm-up.")
    decay: Literal["constant", "polynomial", "linear", "step"] = Field("constant", description="Form of the decay.")
    power: Positive = Field(2.0, description="Power of the polynomial.")
    end_learning_rate: NonNegative = Field(0.0, description="Learning rate at total_steps.")
    total_steps: Count = Field(1, description="Steps until the decay ends; not the measured steps.")
    step_boundaries: tuple[Count, ...] = Field((), description="Steps at which a factor takes over (decay: step).")
    step_factors: tuple[Positive, ...] = Field((), description="Share of the peak from each boundary on.")

    @model_validator(mode="after")
    def _boundaries_match(self) -> Self:
        if len(self.step_boundaries) != len(self.step_factors):
            raise ValueError("step_boundaries and step_factors must have the same length")
        if list(self.step_boundaries) != sorted(set(self.step_boundaries)):
            raise ValueError("step_boundaries must ascend")
        return self


class TrainSpec(Spec):
    """How it is trained."""

    batch_per_rank: Count = Field(description="Samples a rank processes in one step.")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="fp32 (without TF32), or bf16 autocast with fp32 weights."
    )
    optimizer: OptimizerSpec = Field(description="The optimiser.")
    schedule: ScheduleSpec = Field(ScheduleSpec(), description="Learning rate over steps.")
    label_smoothing: Fraction = Field(0.0, description="Label smoothing of the classifier's loss.")
    seed: CountOrZero = Field(0, le=2**32 - 1, description="Seed of weights, order, augmentation and dropout.")


class MeasureSpec(Spec):
    """What is measured."""

    warmup_steps: CountOrZero = Field(description="Steps before the measurement; recorded apart.")
    measured_steps: Count = Field(description="Steps that count.")
    phases: Literal["overlapped", "synchronised"] = Field(
        "overlapped",
        description="'overlapped' adds no synchronisation to training; 'synchronised' waits for the device after "
        "each phase, so that phases are exact and the run is slower.",
    )
    stall_timeout_s: Positive = Field(600.0, description="Without progress for so long, a rank ends itself, seconds.")


class Workload(Spec):
    """One preset of one workload, decided."""

    name: Name = Field(description="Name of the workload, as in its file name.")
    title: str = Field(description="What it trains, in words.")
    sample_unit: str = Field(description="What one sample is called: images, sequences, volumes.")
    preset: Name = Field(description="Name of the preset.")
    about: str = Field(description="What the preset changes against the published configuration.")
    notice: str = Field(description="How results may be called.")
    model: ModelSpec = Field(description="The network.")
    data: DataSpec = Field(description="What it is trained on.")
    train: TrainSpec = Field(description="How it is trained.")

    @model_validator(mode="after")
    def _data_fits_model(self) -> Self:
        fitting = {"resnet": "jpeg-tree", "bert": "text", "cosmoflow": "hdf5-density"}[self.model.family]
        if self.data.format != fitting:
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
