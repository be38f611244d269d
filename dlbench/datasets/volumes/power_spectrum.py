"""Linear matter clustering of a flat universe: four parameters become a power spectrum and its growth.

Cold dark matter without baryons or neutrinos, and a cosmological constant. Lengths are comoving Mpc, wave numbers
1/Mpc, neither divided by h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_THETA = 2.7255 / 2.7
"""Temperature of the microwave background (Fixsen 2009) in the unit of Eisenstein and Hu."""
_LOG_K = (-5.0, 2.0, 1024)
"""Decades of the wave number over which sigma is integrated, and how many points."""


@dataclass(frozen=True, kw_only=True)
class Cosmology:
    """The four parameters that the volumes differ in."""

    omega_m: float
    """Density of matter over the critical density, today."""
    sigma_8: float
    """Standard deviation of the linear density contrast today in spheres of 8 Mpc / h."""
    n_s: float
    """Power of the wave number in the primordial spectrum."""
    h: float
    """Hubble constant over 100 km / s / Mpc."""


def transfer(k: NDArray[np.float64], cosmology: Cosmology) -> NDArray[np.float64]:
    """Transfer function at wave numbers k > 0 in 1/Mpc, 1 at small k.

    Eisenstein and Hu, "Baryonic Features in the Matter Transfer Function" (ApJ 496, 605, 1998), equations 28 and 29:
    the fit without wiggles, for no baryons, where its Gamma_eff is Omega_m h.
    """
    import numpy as np

    q = k * _THETA**2 / (cosmology.omega_m * cosmology.h**2)
    logarithm = np.log(2 * math.e + 1.8 * q)
    fit: NDArray[np.float64] = logarithm / (logarithm + (14.2 + 731 / (1 + 62.5 * q)) * q * q)
    return fit


def _unscaled(k: NDArray[np.float64], cosmology: Cosmology) -> NDArray[np.float64]:
    spectrum: NDArray[np.float64] = k**cosmology.n_s * transfer(k, cosmology) ** 2
    return spectrum


def top_hat(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fourier transform of a sphere of radius R and volume 1, of x = k R > 0."""
    import numpy as np

    # The closed form loses its digits near 0, where the series does not.
    series = 1 - x * x / 10
    closed = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    window: NDArray[np.float64] = np.where(x < 1e-2, series, closed)
    return window


def matter_power(k: NDArray[np.float64], cosmology: Cosmology) -> NDArray[np.float64]:
    """Linear power spectrum today at wave numbers k > 0 in 1/Mpc, in Mpc^3, scaled to sigma_8.

    sigma^2(R) is the integral of k^3 P(k) / (2 pi^2) W^2(k R) over ln k, at R = 8 Mpc / h (Peebles, "The Large-Scale
    Structure of the Universe", 1980).
    """
    import numpy as np

    low, high, points = _LOG_K
    grid = np.logspace(low, high, points)
    integrand = grid**3 / (2 * np.pi**2) * _unscaled(grid, cosmology) * top_hat(grid * 8 / cosmology.h) ** 2
    step = (high - low) * math.log(10) / (points - 1)
    variance = float(integrand.sum() * step)  # the ends are negligible, so the trapezoidal rule is the sum
    return _unscaled(k, cosmology) * (cosmology.sigma_8**2 / variance)


def growth(redshift: float, omega_m: float) -> float:
    """Linear growth since a redshift: the contrast then over that of today, 1 at redshift 0.

    Carroll, Press and Turner, "The Cosmological Constant" (ARA&A 30, 499, 1992), equation 29, in a flat universe.
    """
    return _growth_suppression(redshift, omega_m) / (1 + redshift) / _growth_suppression(0.0, omega_m)


def _growth_suppression(redshift: float, omega_m: float) -> float:
    matter = omega_m * (1 + redshift) ** 3
    m = matter / (matter + 1 - omega_m)
    return 2.5 * m / (math.pow(m, 4 / 7) - (1 - m) + (1 + m / 2) * (1 + (1 - m) / 70))
