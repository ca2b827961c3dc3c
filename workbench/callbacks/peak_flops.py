"""What a device could compute: the peak that a share of it is measured against."""

import warnings

import torch
from lightning.fabric.utilities.throughput import get_available_flops

Peaks = dict[torch.dtype | str, float]

TF32 = "tfloat32"


def _peaks(half: float, tf32: float, fp32: float) -> Peaks:
    """Of a device, given in TFLOPS."""
    return {torch.bfloat16: half * 1e12, torch.float16: half * 1e12, TF32: tf32 * 1e12, torch.float32: fp32 * 1e12}


# Devices that Lightning does not know by the names that CUDA gives them, or takes for others (an L40S for an L4), or counts with
# sparsity (NVL cards): the first whose name occurs in the device's. Dense products, from NVIDIA's data sheets, which give tensor
# cores with sparsity, twice as much, and rounded (H200: 1,979 for bf16; B200: 4.5 PFLOPS for bf16, 2.2 for TF32, which is half).
_KNOWN: dict[str, Peaks] = {
    "gh200": _peaks(989.4, 494.7, 66.9),  # the Hopper GPU of H100 SXM
    "h200 nvl": _peaks(835.5, 417.7, 60.0),
    "h200": _peaks(989.4, 494.7, 66.9),
    "h100 nvl": _peaks(835.5, 417.7, 60.0),
    "gb200": _peaks(2500.0, 1250.0, 80.0),
    "b200": _peaks(2250.0, 1125.0, 75.0),
    "l40s": _peaks(362.05, 183.0, 91.6),
    "l40": _peaks(181.05, 90.5, 90.5),
}


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """Of a device of our table; fp32 products run as TF32 where the process allows it.

    Args:
        name: as CUDA gives it.
        dtype: of the products.
    """
    peaks = next((peaks for part, peaks in _KNOWN.items() if part in name.lower()), {})
    tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return peaks.get(TF32 if tf32 else dtype)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating-point operations per second that one device could do; None where nobody has a number for it."""
    if device.type != "cuda":
        return None
    known = known_peak(torch.cuda.get_device_name(device), dtype)
    if known is not None:
        return known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the caller says what is missing, and what to do
        return get_available_flops(device, dtype)
