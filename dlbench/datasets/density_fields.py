"""A random universe in small: log-normal density fields whose four parameters a network can learn to read.

Not cosmology, but of its form: a Gaussian random field with a power-law spectrum and a small-scale cut-off, grown
through four epochs (the channels), made log-normal (Coles and Jones, "A lognormal model for the cosmological mass
distribution", 1991, section 2), and sampled as counts of particles in cells.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.errors import EnvironmentLacksError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GROWTH = (0.4, 0.6, 0.8, 1.0)
"""Linear growth of each channel, from early to late."""
# Ranges that a target from -1 to 1 spans.
_SIGMA = (0.5, 1.5)  # standard deviation of the Gaussian field at full growth
_TILT = (-2.5, -0.5)  # power of the wave number in the spectrum
_CUTOFF = (0.15, 0.6)  # wave number of the Gaussian cut-off, in units of the Nyquist wave number
_MEAN = (2.0, 8.0)  # particles per cell


def _scaled(target: float, low_high: tuple[float, float]) -> float:
    low, high = low_high
    return low + (high - low) * (float(target) + 1) / 2


def density_sample(targets: NDArray[np.float32], size: int, generator: np.random.Generator) -> NDArray[np.int16]:
    """One volume (size, size, size, 4) of counts for four targets in [-1, 1]: amplitude, tilt, cut-off, mean."""
    import numpy as np

    sigma, tilt, cutoff, mean = (_scaled(t, r) for t, r in zip(targets, (_SIGMA, _TILT, _CUTOFF, _MEAN), strict=True))
    frequency = np.fft.fftfreq(size) * 2
    last = np.fft.rfftfreq(size) * 2
    wave = np.sqrt(frequency[:, None, None] ** 2 + frequency[None, :, None] ** 2 + last[None, None, :] ** 2)
    wave[0, 0, 0] = 1.0
    amplitude = wave ** (tilt / 2) * np.exp(-((wave / cutoff) ** 2) / 2)
    amplitude[0, 0, 0] = 0.0
    white = generator.standard_normal((size, size, size))
    gaussian = np.fft.irfftn(np.fft.rfftn(white) * amplitude, s=white.shape, axes=(0, 1, 2))
    gaussian *= sigma / gaussian.std()
    grown = gaussian[..., None] * np.array(GROWTH)
    # The subtracted half variance keeps the mean density at 1 in every channel.
    density = np.exp(grown - grown.var(axis=(0, 1, 2)) / 2)
    counts = np.minimum(generator.poisson(mean * density), np.iinfo(np.int16).max)
    volume: NDArray[np.int16] = counts.astype(np.int16)
    return volume


def write_density_fields(folder: Path, *, num_samples: int, size: int, num_files: int, seed: int) -> dict[str, int]:
    """Writes `density-<n>.h5` into an existing folder, one compressed chunk a sample; returns counts.

    Raises:
        EnvironmentLacksError: h5py is not installed.
    """
    import numpy as np

    try:
        import h5py
    except ImportError:
        raise EnvironmentLacksError("h5py is not installed; pip install 'dlbench[demo]'") from None

    shares = np.array_split(np.arange(num_samples), num_files)
    for number, samples in enumerate(shares):
        with h5py.File(folder / f"density-{number}.h5", "w") as file:
            shape = (len(samples), size, size, size, len(GROWTH))
            x = file.create_dataset(
                "x", shape, dtype="int16", chunks=(1, *shape[1:]), compression="gzip", compression_opts=1, shuffle=True
            )
            y = file.create_dataset("y", (len(samples), 4), dtype="float32", chunks=(1, 4))
            for place, sample in enumerate(samples):
                generator = np.random.default_rng([seed, int(sample)])
                targets = generator.uniform(-1, 1, 4).astype(np.float32)
                x[place] = density_sample(targets, size, generator)
                y[place] = targets
    return {"files": num_files, "volumes": num_samples}
