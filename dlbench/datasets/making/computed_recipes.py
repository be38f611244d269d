"""Makes density volumes, and a text from what the running Python has.

Volumes are counts of particles at four epochs for random values of four cosmological parameters.

A log-normal model (Coles and Jones, "A lognormal model for the cosmological mass distribution", MNRAS 248, 1, 1991)
without gravity, and so without filaments and haloes. Per volume:

1. A Gaussian field G of the linear power spectrum of `matter_power`, periodic in a box of `size` cells of CELL Mpc.
2. At each redshift the density rho = exp(D G - D^2 var(G) / 2), of mean 1, with D the linear growth. All epochs have
   the same realisation. The spectrum is that of ln rho; that of the density is higher at strong clustering.
3. Counts from a Poisson distribution of mean N rho, where N = MEAN_COUNT (Omega_m h^2) / (0.3 * 0.7^2): all particles
   have the same mass and all cells the same volume, so that N is proportional to the mean density of matter.

The parameters are those of the public cosmoUniverse set. NARROW ranges are near the published ones (Mathuriya et al.,
"CosmoFlow", SC18; the range of h is ours). A small volume has too few modes to show such differences: WIDE ranges are
for volumes of 32^3. The power spectrum is that of cold dark matter without baryons or neutrinos, and a cosmological
constant, in a flat universe. Lengths are comoving Mpc, wave numbers 1/Mpc, neither divided by h.

The text has the reference topics and the docstrings of the running Python's standard library. Left out are tests,
modules that distributions package separately, `encodings`, whose modules all have the same text, and doctests. There is
one document per topic (`topic/for`) or module (`module/asyncio/queues.py`): with CPython 3.11.7 379 documents, 1.57 MB,
20,148 sentences. Copyright Python Software Foundation, PSF License Version 2.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.arrays import make_hdf5
from dlbench.datasets.making.production import DatasetPart, numbered_parts
from dlbench.datasets.manifest import MadeWith
from dlbench.datasets.splits import Split
from dlbench.datasets.tfrecord import RecordWriter
from dlbench.datasets.volumes import Volume, encode_volume
from dlbench.errors import EnvironmentLacksError

_THETA = 2.7255 / 2.7  # temperature of the microwave background (Fixsen 2009) in the unit of Eisenstein and Hu
_LOG_K = (-5.0, 2.0, 1024)  # decades of the wave number over which sigma is integrated, and number of points
VERSION = 1  # increased whenever the same settings make other volumes
REDSHIFTS = (3.0, 1.5, 0.5, 0.0)  # of the channels, from early to late
CELL = 4.0  # edge of a cell, Mpc
MEAN_COUNT = 4.0  # particles in a cell on average at Omega_m = 0.3, h = 0.7
GZIP_LEVEL = 1  # of HDF5 and TFRecord; level 6 of the public set takes ten times as long for files a fifth smaller
Container = Literal["hdf5", "tfrecord"]
Ranges = Mapping[str, tuple[float, float]]
NARROW: Ranges = {"omega_m": (0.25, 0.35), "sigma_8": (0.78, 0.95), "n_s": (0.9, 1.0), "h": (0.6, 0.75)}
"""What targets from -1 to 1 span, in the order of the targets."""

WIDE: Ranges = {"omega_m": (0.1, 0.6), "sigma_8": (0.4, 1.2), "n_s": (0.2, 1.8), "h": (0.4, 1.0)}  # For small volumes.
_SPLIT_NUMBERS: Mapping[Split, int] = {"train": 0, "validation": 1}
Numbers = NDArray[np.int64]
_RULE = re.compile(r"^[\s*=~^\-_.+|]*$")
_DOCTEST = re.compile(r"^\s*>>>", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?:]) +(?=[A-Z\"'(\[])")
_LEFT_OUT = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"),
    *("tkinter", "idlelib", "turtledemo", "turtle.py", "lib2to3", "distutils", "ensurepip", "config"),
}
_MIN_SENTENCES = 3  # shorter documents are left out: no next sentence could be drawn
_LONG = 40  # characters from which a sentence may occur only once, so that validation text is not in the training text
_MIN_MODULES = 100  # with fewer modules that have docstrings, the sources are not installed
NOTICE = """\
The text is the reference topics of Python {version} and the docstrings of its standard library, unwrapped to one
sentence a line. Copyright Python Software Foundation. Used under the Python Software Foundation License Version 2
(https://docs.python.org/3/license.html); examples are also under the Zero-Clause BSD License.
"""
_DEALING = 1  # added to the seed


@dataclass(frozen=True, kw_only=True)
class Cosmology:
    """The four parameters that the volumes differ in."""

    omega_m: float  # density of matter over the critical density, today
    sigma_8: float  # standard deviation of the linear density contrast today in spheres of 8 Mpc / h
    n_s: float  # power of the wave number in the primordial spectrum
    h: float  # Hubble constant over 100 km / s / Mpc


def transfer(k: NDArray[np.float64], cosmology: Cosmology) -> NDArray[np.float64]:
    """Returns the transfer function at wave numbers k > 0 in 1/Mpc, which is 1 at small k. Eisenstein and Hu, "Baryonic
    Features in the Matter Transfer Function" (ApJ 496, 605, 1998), equations 28 and 29: the fit without wiggles, for no
    baryons, where its Gamma_eff is Omega_m h.
    """
    q = k * _THETA**2 / (cosmology.omega_m * cosmology.h**2)
    logarithm = np.log(2 * math.e + 1.8 * q)
    fit: NDArray[np.float64] = logarithm / (logarithm + (14.2 + 731 / (1 + 62.5 * q)) * q * q)
    return fit


def _unscaled(k: NDArray[np.float64], cosmology: Cosmology) -> NDArray[np.float64]:
    spectrum: NDArray[np.float64] = k**cosmology.n_s * transfer(k, cosmology) ** 2
    return spectrum


def top_hat(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the Fourier transform of a sphere of radius R and volume 1 at x = k R > 0."""
    # The closed form is inaccurate near 0, where the series is used.
    series = 1 - x * x / 10
    closed = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    window: NDArray[np.float64] = np.where(x < 1e-2, series, closed)
    return window


def matter_power(k: NDArray[np.float64], cosmology: Cosmology) -> NDArray[np.float64]:
    """Returns the linear power spectrum today at wave numbers k > 0 in 1/Mpc, in Mpc^3, scaled to sigma_8. sigma^2(R)
    is the integral of k^3 P(k) / (2 pi^2) W^2(k R) over ln k, at R = 8 Mpc / h (Peebles, "The Large-Scale Structure of
    the Universe", 1980).
    """
    low, high, points = _LOG_K
    grid = np.logspace(low, high, points)
    integrand = grid**3 / (2 * np.pi**2) * _unscaled(grid, cosmology) * top_hat(grid * 8 / cosmology.h) ** 2
    step = (high - low) * math.log(10) / (points - 1)
    variance = float(integrand.sum() * step)  # the ends are negligible, so the trapezoidal rule is the sum
    return _unscaled(k, cosmology) * (cosmology.sigma_8**2 / variance)


def growth(redshift: float, omega_m: float) -> float:
    """Returns the linear growth: the contrast at a redshift over that of today, 1 at redshift 0. Carroll, Press and
    Turner, "The Cosmological Constant" (ARA&A 30, 499, 1992), equation 29, in a flat universe.
    """
    return _growth_suppression(redshift, omega_m) / (1 + redshift) / _growth_suppression(0.0, omega_m)


def _growth_suppression(redshift: float, omega_m: float) -> float:
    matter = omega_m * (1 + redshift) ** 3
    m = matter / (matter + 1 - omega_m)
    return 2.5 * m / (math.pow(m, 4 / 7) - (1 - m) + (1 + m / 2) * (1 + (1 - m) / 70))


@lru_cache(maxsize=2)
def _squared_waves(size: int) -> NDArray[np.int64]:
    """Returns squares (size, size, size // 2 + 1) of the wave numbers of a box of edge 2 pi, which are integers."""
    full = np.rint(np.fft.fftfreq(size) * size).astype(np.int64) ** 2
    half = np.arange(size // 2 + 1, dtype=np.int64) ** 2
    squares: NDArray[np.int64] = full[:, None, None] + full[None, :, None] + half[None, None, :]
    return squares


def gaussian_field(
    cosmology: Cosmology, size: int, generator: np.random.Generator
) -> tuple[NDArray[np.float32], float]:
    """Returns a field (size, size, size) of today's linear spectrum with mean 0, and its variance over realisations."""
    waves = _squared_waves(size)
    unit = 2 * math.pi / (size * CELL)
    # Power depends only on the square of the wave number, which has few distinct values.
    power = np.zeros(3 * (size // 2) ** 2 + 1)
    power[1:] = matter_power(unit * np.sqrt(np.arange(1, len(power))), cosmology) / CELL**3
    modes = np.fft.rfftn(generator.standard_normal((size, size, size), dtype=np.float32))
    spectrum = power[waves]
    modes *= np.sqrt(spectrum).astype(np.float32)
    # Each mode counts twice, except those of the first plane and, for an even size, of the last.
    planes = spectrum.sum(axis=(0, 1))
    total = 2 * planes.sum() - planes[0]
    if size % 2 == 0:
        total -= planes[-1]
    field = np.fft.irfftn(modes, s=(size, size, size), axes=(0, 1, 2)).astype(np.float32, copy=False)
    return field, float(total / size**3)


def density_sample(
    targets: Sequence[float] | NDArray[np.float32], size: int, generator: np.random.Generator, ranges: Ranges = WIDE
) -> NDArray[np.int16]:
    """Returns a volume (size, size, size, 4) of counts for four targets in [-1, 1]: Omega_m, sigma_8, n_s, h."""
    values = {
        name: low + (high - low) * (float(target) + 1) / 2
        for target, (name, (low, high)) in zip(targets, ranges.items(), strict=True)
    }
    cosmology = Cosmology(**values)
    field, variance = gaussian_field(cosmology, size, generator)
    mean = MEAN_COUNT * cosmology.omega_m * cosmology.h**2 / (0.3 * 0.7**2)
    largest = np.iinfo(np.int16).max
    volume = np.empty((size, size, size, len(REDSHIFTS)), dtype=np.int16)
    for channel, redshift in enumerate(REDSHIFTS):
        grown = growth(redshift, cosmology.omega_m)
        expected = mean * np.exp(grown * field - grown**2 * variance / 2, dtype=np.float64)
        counts = generator.poisson(np.minimum(expected, largest))
        volume[..., channel] = np.minimum(counts, largest)
    return volume


@dataclass(frozen=True, kw_only=True)
class DensityRecipe:
    """A data set of volumes. Training and validation use different random generators."""

    num_train: int
    num_validation: int
    size: int = 128  # edge of a volume, cells
    container: Container = "hdf5"  # `tfrecord` is gzip-compressed, as the public set is
    seed: int = 0
    samples_per_file: int = 1
    wide: bool = False  # whether parameters have WIDE ranges, for small volumes, or NARROW ones
    kind: str = "density"

    @property
    def made_with(self) -> MadeWith:
        ranges = {f"range_{name}": f"{low:g} to {high:g}" for name, (low, high) in self._ranges.items()}
        return {
            "generator": f"dlbench log-normal density fields, version {VERSION}",
            "num_train": self.num_train,
            "num_validation": self.num_validation,
            "size": self.size,
            "container": self.container,
            "seed": self.seed,
            "samples_per_file": self.samples_per_file,
            "wide": self.wide,
            **ranges,
            "redshifts": ", ".join(f"{z:g}" for z in REDSHIFTS),
            "cell_mpc": CELL,
            "mean_count": MEAN_COUNT,
            "gzip_level": GZIP_LEVEL,
        }

    @property
    def _ranges(self) -> Ranges:
        return WIDE if self.wide else NARROW

    def parts(self) -> Sequence[DatasetPart]:
        suffix = "h5" if self.container == "hdf5" else "tfrecord"
        train = numbered_parts("train", "density", suffix, self.num_train, self.samples_per_file)
        return train + numbered_parts("validation", "density", suffix, self.num_validation, self.samples_per_file)

    def sample(self, split: Split, number: int) -> Volume:
        """Returns one sample, by its number in the split."""
        generator = np.random.default_rng([self.seed, _SPLIT_NUMBERS[split], number])
        targets = generator.uniform(-1, 1, 4).astype(np.float32)
        return density_sample(targets, self.size, generator, self._ranges), targets

    def write(self, part: DatasetPart, path: Path) -> None:
        samples = (self.sample(part.split, number) for number in range(part.first, part.first + part.count))
        shape = (part.count, self.size, self.size, self.size, len(REDSHIFTS))
        write_volumes(path, self.container, samples, shape, num_targets=4)

    def finish(self, folder: Path) -> None:
        """Does nothing: there are no files next to the volumes."""


def write_volumes(
    path: Path, container: Container, samples: Iterator[Volume], shape: tuple[int, ...], num_targets: int
) -> None:
    """Writes one file of volumes; the same samples give the same bytes. `shape`: of all samples, (n, S, S, S, C)."""
    if container == "hdf5":
        _write_hdf5(path, samples, shape, num_targets)
        return
    with RecordWriter(path, gzip=True, level=GZIP_LEVEL) as writer:
        for x, y in samples:
            writer.write(encode_volume(x, y))


def _write_hdf5(path: Path, samples: Iterator[Volume], shape: tuple[int, ...], num_targets: int) -> None:
    try:
        new_file = make_hdf5(path)
    except ImportError:
        raise EnvironmentLacksError("h5py is not installed; pip install 'dlbench[data]'") from None

    with new_file as file:
        # fletcher32 detects flipped bits that gzip does not.
        x = file.create_dataset(
            "x",
            shape,
            dtype="int16",
            chunks=(1, *shape[1:]),
            compression="gzip",
            compression_opts=GZIP_LEVEL,
            shuffle=True,
            fletcher32=True,
        )
        y = file.create_dataset("y", (shape[0], num_targets), dtype="float32", chunks=(1, num_targets), fletcher32=True)
        for index, (counts, targets) in enumerate(samples):
            x[index], y[index] = counts, targets


def topic_sentences(topic: str) -> list[str]:
    """Returns the sentences of a topic, without the rules of headings."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", topic):
        lines = [line.strip() for line in paragraph.splitlines() if not _RULE.match(line)]
        if lines:
            sentences += [part for part in _SENTENCE_END.split(" ".join(lines)) if part]
    return sentences


@dataclass(frozen=True)
class TextDocument:
    """One document of the text."""

    name: str
    sentences: tuple[str, ...]


def python_version() -> str:
    """Returns the version of the running Python, such as 3.11.7."""
    return ".".join(map(str, sys.version_info[:3]))


@lru_cache(maxsize=1)
def python_documents() -> tuple[TextDocument, ...]:
    """Returns all documents of the running Python, sorted by name; parsed once per process, in some seconds."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    documents = [TextDocument(f"topic/{name}", tuple(topic_sentences(text))) for name, text in sorted(topics.items())]
    num_modules = 0
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        # Debian and others put a config-3.11-... folder next to the modules.
        names = [re.sub(r"^config-.*", "config", part) for part in parts]
        if _LEFT_OUT.isdisjoint(names):
            sentences = _docstring_sentences(path)
            if sentences:
                num_modules += 1
            documents.append(TextDocument(f"module/{'/'.join(parts)}", tuple(sentences)))
    if num_modules < _MIN_MODULES:
        raise EnvironmentLacksError(
            f"the sources of Python's standard library are not in {library} ({num_modules} modules with docstrings); "
            "use a Python that has them, or give your own text"
        )
    return _without_repeats(sorted(documents, key=attrgetter("name")))


def _without_repeats(documents: list[TextDocument]) -> tuple[TextDocument, ...]:
    """Keeps only the first occurrence of long sentences: overridden methods repeat docstrings of other modules."""
    earlier_sentences: set[str] = set()
    unique_documents = []
    for document in documents:
        sentences = tuple(s for s in document.sentences if len(s) < _LONG or s not in earlier_sentences)
        earlier_sentences.update(sentences)
        if len(sentences) >= _MIN_SENTENCES:
            unique_documents.append(TextDocument(document.name, sentences))
    return tuple(unique_documents)


def _docstring_sentences(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # some libraries contain templates and deliberately wrong files
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    # In the order of the source: ast.walk goes level by level, and a module has no line number.
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    sentences = []
    for node in nodes:
        paragraphs = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
        text = "\n\n".join(paragraph for paragraph in paragraphs if not _DOCTEST.search(paragraph))
        # A few docstrings have characters that UTF-8 cannot encode.
        text = text.replace("``", "").replace("`", "'").encode("utf-8", "ignore").decode("utf-8")
        sentences += topic_sentences(text)
    return sentences


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """The text as UTF-8 files, one sentence per line, a blank line between documents."""

    seed: int = 0
    validation_share: float = 0.1  # share of the documents
    kind: str = "text"

    @property
    def made_with(self) -> MadeWith:
        digest = hashlib.sha256()  # of names and sentences
        for document in python_documents():
            digest.update("\n".join([document.name, *document.sentences, "", ""]).encode("utf-8"))
        return {
            "text": "embedded",
            "text_sha256": digest.hexdigest(),
            "python": python_version(),
            "seed": self.seed,
            "validation_share": self.validation_share,
        }

    def parts(self) -> Sequence[DatasetPart]:
        return [
            DatasetPart(name=f"{split}/text-00000.txt", split=split, first=0, count=len(numbers))
            for split, numbers in self._split.items()
        ]

    def write(self, part: DatasetPart, path: Path) -> None:
        documents = python_documents()
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for number in self._split[part.split].tolist():
                file.write("".join(f"{sentence}\n" for sentence in documents[number].sentences) + "\n")

    def finish(self, folder: Path) -> None:
        # Not *.txt, because that would be read as text.
        (folder / "LICENSES").write_text(NOTICE.format(version=python_version()), encoding="utf-8")

    @property
    def _split(self) -> dict[Split, Numbers]:
        """The numbers of the documents of each split, in random order."""
        num_documents = len(python_documents())
        # At least two, because a random next sentence needs another document.
        num_validation = max(2, round(num_documents * self.validation_share))
        order = np.random.default_rng([self.seed, _DEALING]).permutation(num_documents)
        return {"train": order[num_validation:], "validation": order[:num_validation]}
