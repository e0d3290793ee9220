"""The hardware of a process, and how torch is set on it: what the bits of a result depend on beside
the code.
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
from rayfed.rounds.round import Kind

# Huge pages, from torch's first allocation on: a step is 5 % faster.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Variables of the environment that decide bits, and those of such names that decide none: rayfed
# sets the threads.
DECIDE = re.compile(
    r"(ATEN|BLIS|CUBLAS(LT)?|CUDNN|DNNL|MKL|NPY_(DIS|EN)ABLE|NVIDIA_TF32|ONEDNN|OPENBLAS)_|OMP_(DYNAMIC|THREAD_LIMIT)$"
    r"|TORCH_(ALLOW_TF32|BLAS|CUBLAS|CUDNN|LINALG|MKLDNN)_|DISABLE_ADDMM_"
)
HARMLESS = re.compile(
    r"VERBOSE|LOG|DUMP|PROFILE|CACHE_CAPACITY|(MKL|BLAS|BLIS)_(NUM_THREADS|DYNAMIC)|WORKSPACE_CONFIG"
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
# As glibc's malloc.h numbers them.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# What to do about errors of CUDA's, by a pattern in their text.
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


# Of GPU memory, in this process.
_ran_short = False


def kind_of(device: torch.device) -> Kind:
    """The hardware, and torch's settings: what the bits of a result depend on beside the code and
    its versions.
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
    """Those of the environment that change how torch and its libraries compute: `NAME=value
    NAME=value`.
    """
    names = [
        name
        for name, value in os.environ.items()
        if value and DECIDE.match(name) and not HARMLESS.search(name)
    ]
    return " ".join(f"{name}={os.environ[name]}" for name in sorted(names))


def _processor() -> Kind:
    """Its maker, and its instructions for matrices and short numbers: oneDNN and MKL choose their
    code by both.
    """
    of_linux = ""
    # There is no /proc.
    with suppress(OSError):
        of_linux = Path("/proc/cpuinfo").read_text()
    capabilities = _capabilities(of_linux)
    maker = str(capabilities.get("cpu_name", "")).partition(" ")[0]
    line = re.search(r"(?:vendor_id|CPU implementer)\s*:\s*(\S+)", of_linux)
    if line:
        maker = line[1]
    present = [name for name, has_it in capabilities.items() if has_it is True]
    short = [name for name in present if re.search("amx|bf16|fp16|i8mm|sve|vnni", name)]
    return {"maker": maker or "unknown", "extensions": " ".join(sorted(short)) or "none"}


def _capabilities(of_linux: str) -> Mapping[str, Any]:
    """The processor's instructions, by torch's names; `of_linux` is the text of /proc/cpuinfo.

    torch 2.7 to 2.10 cannot tell, so the text is read instead. That way, with `SHORT`, can go once
    pyproject.toml asks for torch 2.11.
    """
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        found: Mapping[str, Any] = ask()
        return found
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", of_linux, re.MULTILINE)
    present = flags[1].split() if flags else []
    return {name: True for key, name in SHORT.items() if key in present}


def make_cuda_repeatable() -> None:
    """Set CUDA, in this process, to give the same bits every time, and float32 where float32 is
    asked for.

    What has no such form is an error, with `ADVICE`. Raises `InputError` in a process that ran
    short of GPU memory.
    """
    if _ran_short:
        raise InputError(
            "this process ran short of GPU memory before, and cuDNN keeps to the way of computing "
            "that it then took, whose results have other bits; start a new process: the same "
            "command continues"
        )
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = (
        # Read when cuBLAS is first used; another size, other bits.
        ":4096:8"
    )
    torch.use_deterministic_algorithms(True)
    # Filling memory that is overwritten anyway was a third of a small model's operations.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # It would choose by time, so differently each time.
    torch.backends.cudnn.benchmark = False
    # Torch's default in convolutions is on.
    set_tf32(False)


def refuse_tf32(device: torch.device) -> None:
    """Raises `InputError` where a device has no TF32."""
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
    """Let this process keep what torch frees: to have it from the kernel again slows evaluation by
    15 %.
    """
    if platform.libc_ver()[0] == "glibc":
        of_c = ctypes.CDLL(None)
        # Bytes, at the end of the heap.
        of_c.mallopt(M_TRIM_THRESHOLD, 2**27)
        # The most that glibc takes.
        of_c.mallopt(M_MMAP_THRESHOLD, 2**25)


def _refused_requests() -> int:
    """How many requests for GPU memory have failed in this process, with those that torch has dealt
    with itself.
    """
    return torch.cuda.memory_stats().get("num_ooms", 0) if torch.cuda.is_initialized() else 0


@contextmanager
def advising() -> Iterator[None]:
    """An error of CUDA's in the context comes with a note: what to do next.

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
