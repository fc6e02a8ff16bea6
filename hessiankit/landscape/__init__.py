"""The loss around a point: eigenpairs and spectral density of its Hessian, and slices of the loss itself."""

from hessiankit.landscape.critical import CriticalSharpness, critical_sharpness
from hessiankit.landscape.density import Density
from hessiankit.landscape.preconditioner import Preconditioner
from hessiankit.landscape.slices import LossPlane, LossSlice, LossSlices, loss_slices
from hessiankit.landscape.spectra import spectrum
from hessiankit.landscape.spectrum_result import Spectrum

__all__ = [
    "CriticalSharpness",
    "Density",
    "LossPlane",
    "LossSlice",
    "LossSlices",
    "Preconditioner",
    "Spectrum",
    "critical_sharpness",
    "loss_slices",
    "spectrum",
]
