"""Describe the hardware of a process, and set torch on it.

The bits of a result depend on both, beside the code.
"""

import ctypes
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from rayfed.base.errors import InputError
from rayfed.base.isolation import set_tf32
from rayfed.rounds.round import HardwareKind

# This gives torch huge pages from its first allocation on: a step is 5 % faster.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# The names of variables of the environment that decide bits.
DECIDE = re.compile(
    r"(ATEN|BLIS|CUBLAS(LT)?|CUDNN|DNNL|MKL|NPY_(DIS|EN)ABLE|NVIDIA_TF32|ONEDNN|OPENBLAS)_"
    r"|OMP_(DYNAMIC|THREAD_LIMIT)$"
    r"|TORCH_(ALLOW_TF32|BLAS|CUBLAS|CUDNN|LINALG|MKLDNN)_|DISABLE_ADDMM_"
)
# The names among them that decide none. The number of threads does, but rayfed sets it.
HARMLESS = re.compile(
    r"VERBOSE|LOG|DUMP|PROFILE|CACHE_CAPACITY|WORKSPACE_CONFIG"
    r"|(MKL|BLAS|BLIS)_(NUM_THREADS|DYNAMIC)"
)
# Instructions for matrices and short numbers: Linux's names in /proc/cpuinfo, and torch's names.
SHORT = {
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "amx_int8": "amx_int8",
    "amx_tile": "amx_tile",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "bf16": "bf16",
    "fphp": "fp16_arith",
    "i8mm": "i8mm",
    "sve": "sve",
    "sve2": "sve2",
    "svebf16": "sve_bf16",
}
# The numbers of these settings in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# What to do about an error of CUDA's, by a pattern in its text.
ADVICE = {
    "does not have a deterministic implementation": (
        "on a GPU this operation gives other bits each time, so rayfed refuses it: put another in "
        "its place, in the model or the part (such as AvgPool2d for AdaptiveAvgPool2d), or train "
        "on CPUs with ray.num_gpus = 0"
    ),
    "CUDA out of memory|CUDA error: out of memory|_ALLOC_FAILED": (
        "its actor has too little GPU memory: try a larger ray.num_gpus (auto measures the need), "
        "or a smaller train.batch_size"
    ),
}


# Whether this process ran short of GPU memory before.
_ran_short = False


def kind_of(device: torch.device) -> HardwareKind:
    """Return the hardware, and torch's settings.

    The bits of a result depend on them beside the code and its versions.
    """
    settings = {
        "float32": torch.get_float32_matmul_precision(),
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
        "variables": _variables() or "none",
    }
    if device.type == "cuda":
        tf32 = "yes" if torch.backends.cudnn.allow_tf32 else "no"
        return {"device": torch.cuda.get_device_name(device), "tf32 in cudnn": tf32, **settings}
    instructions = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"device": device.type, "instructions": instructions, **_processor(), **settings}


def _variables() -> str:
    """Return the variables of the environment that change how torch and its libraries compute.

    They are written as `NAME=value NAME=value`.
    """
    names = [
        name
        for name, value in os.environ.items()
        if value and DECIDE.match(name) and not HARMLESS.search(name)
    ]
    return " ".join(f"{name}={os.environ[name]}" for name in sorted(names))


def _processor() -> HardwareKind:
    """Return the processor's maker, and its instructions for matrices and short numbers.

    oneDNN and MKL choose their code by both.
    """
    cpuinfo = ""
    # The file is missing where there is no /proc.
    with suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
    capabilities = _capabilities(cpuinfo)
    maker = str(capabilities.get("cpu_name", "")).partition(" ")[0]
    line = re.search(r"(?:vendor_id|CPU implementer)\s*:\s*(\S+)", cpuinfo)
    if line:
        maker = line[1]
    present = [name for name, has_it in capabilities.items() if has_it is True]
    short = [name for name in present if re.search("amx|bf16|fp16|i8mm|sve|vnni", name)]
    return {"maker": maker or "unknown", "extensions": " ".join(sorted(short)) or "none"}


def _capabilities(cpuinfo: str) -> Mapping[str, Any]:
    """Return the processor's instructions, by torch's names.

    `cpuinfo` is the text of /proc/cpuinfo. torch 2.7 to 2.10 cannot tell the instructions, so the
    text is read instead. That way, with `SHORT`, can go once pyproject.toml asks for torch 2.11.
    """
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        capabilities: Mapping[str, Any] = ask()
        return capabilities
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    present = flags[1].split() if flags else []
    return {name: True for key, name in SHORT.items() if key in present}


def make_cuda_repeatable() -> None:
    """Set CUDA, in this process, to give the same bits every time.

    It also computes in float32 where float32 is asked for. What has no such form is an error, with
    `ADVICE`. Raise `InputError` in a process that ran short of GPU memory.
    """
    if _ran_short:
        raise InputError(
            "this process ran short of GPU memory before, and cuDNN keeps to the way of computing "
            "that it then took, whose results have other bits; start a new process: the same "
            "command continues"
        )
    # cuBLAS reads this when it is first used. Another size would give other bits.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # It would fill memory that is overwritten anyway: a third of a small model's operations.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The benchmark would choose by time, and so differently each time.
    torch.backends.cudnn.benchmark = False
    # In convolutions torch has TF32 on by default.
    set_tf32(False)


def refuse_tf32(device: torch.device) -> None:
    """Raise `InputError` where a device has no TF32."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if (
        device.type != "cuda"
        or torch.version.cuda is None
        or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        raise InputError(
            "train.precision = 'tf32' needs an NVIDIA GPU of Ampere (2020) or later, and clients "
            f"would train on {card}; use 'float32', or 'bf16', which any device has"
        )


def keep_freed_memory() -> None:
    """Let this process keep what torch frees.

    To have it from the kernel again slows evaluation by 15 %.
    """
    if platform.libc_ver()[0] == "glibc":
        glibc = ctypes.CDLL(None)
        # The bytes at the end of the heap that are kept.
        glibc.mallopt(M_TRIM_THRESHOLD, 2**27)
        # Smaller pieces, in bytes, come from the heap. It is the most that glibc accepts.
        glibc.mallopt(M_MMAP_THRESHOLD, 2**25)


def _refused_requests() -> int:
    """Return how many requests for GPU memory have failed in this process.

    Those that torch has dealt with itself count too.
    """
    if not torch.cuda.is_initialized():
        return 0
    return torch.cuda.memory_stats().get("num_ooms", 0)


@contextmanager
def advising() -> Iterator[None]:
    """Add a note to an error of CUDA's in the context: what to do next.

    Too little memory is an error here even where cuDNN has made do with less: its other ways round
    otherwise, so that the bits would depend on who else is on the GPU. It also keeps to them, for
    the rest of the process.
    """
    global _ran_short
    refused = _refused_requests()
    try:
        yield
        if _refused_requests() > refused:
            raise torch.OutOfMemoryError(
                "CUDA out of memory, for the way of computing that gives the same bits anywhere"
            )
    except Exception as error:
        _ran_short |= _refused_requests() > refused
        for pattern, advice in ADVICE.items():
            if re.search(pattern, str(error)):
                error.add_note(advice)
        raise
