"""Augmentation equals a plain loop over images, and without augmentation images are only
normalised.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.data.augment import prepare
from rayfed.data.settings import Augment

few = settings(max_examples=40)
MEAN, STD = (0.2, 0.5, 0.7), (0.3, 0.25, 0.5)


def images(n: int, channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    shape = (n, channels, height, width)
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def normalised(pixels: np.ndarray, channels: int) -> np.ndarray:
    mean, std = (np.array(v[:channels]).reshape(-1, 1, 1) for v in (MEAN, STD))
    return (pixels / 255 - mean) / std


def slow(pixels: torch.Tensor, rows: torch.Tensor, seed: int, a: Augment) -> np.ndarray:
    """The same draws, applied image by image in numpy."""
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = pixels.shape[1:]

    def draw(below: int, on: object) -> list[int]:
        return (
            torch.randint(below, (len(rows),), generator=generator).tolist()
            if on
            else [0] * len(rows)
        )

    tops, lefts, flips = draw(2 * a.crop + 1, a.crop), draw(2 * a.crop + 1, a.crop), draw(2, a.flip)
    ys, xs = draw(height, a.cutout), draw(width, a.cutout)
    out = []
    for row, top, left, flip, y, x in zip(rows.tolist(), tops, lefts, flips, ys, xs, strict=True):
        mode = "reflect" if a.crop_padding == "reflect" else "constant"
        padded = np.pad(
            pixels[row].numpy(), ((0, 0), (a.crop, a.crop), (a.crop, a.crop)), mode=mode
        )
        image = padded[:, top : top + height, left : left + width]
        image = normalised(image[:, :, ::-1] if flip else image, channels)
        if a.cutout:
            up, across = y - a.cutout // 2, x - a.cutout // 2
            image[:, max(up, 0) : up + a.cutout, max(across, 0) : across + a.cutout] = 0
        out.append(image)
    return np.stack(out)


@few
@given(
    st.builds(
        Augment,
        st.integers(0, 4),
        st.sampled_from(["zero", "reflect"]),
        st.booleans(),
        st.integers(0, 9),
    ),
    st.sampled_from([(1, 5, 5), (3, 5, 8), (3, 8, 5)]),
    st.lists(st.integers(0, 5), min_size=1, max_size=7),
    st.integers(0, 99),
)
def test_a_batch_equals_a_loop_over_its_images(a, shape, rows, seed):
    pixels, rows = images(6, *shape), torch.tensor(rows)
    batches = prepare(pixels, MEAN[: shape[0]], STD[: shape[0]], a)
    batch = batches.augmented(batches.draws(rows, torch.Generator().manual_seed(seed)))
    assert batch.dtype == torch.float32
    assert batch.shape == (len(rows), *shape)
    assert batches.shape == shape
    torch.testing.assert_close(
        batch.double(), torch.tensor(slow(pixels, rows, seed, a)), rtol=1e-5, atol=1e-5
    )


@few
@given(
    st.builds(
        Augment,
        st.integers(0, 3),
        st.sampled_from(["zero", "reflect"]),
        st.booleans(),
        st.integers(0, 9),
    )
)
def test_plain_images_are_only_normalised_and_draw_nothing(a):
    pixels, rows = images(4, 3, 6, 7), torch.tensor([3, 0])
    plain = prepare(pixels, MEAN, STD, a).plain(rows)
    generator = torch.Generator()
    before = generator.get_state()
    batches = prepare(pixels, MEAN, STD)
    assert torch.equal(plain, batches.augmented(batches.draws(rows, generator)))
    assert torch.equal(prepare(pixels, MEAN, STD, a).plain()[rows], plain)
    assert torch.equal(before, generator.get_state())
    torch.testing.assert_close(
        plain.double(), torch.tensor(normalised(pixels[rows].numpy(), 3)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("a", [Augment(), Augment(crop=2, flip=True, cutout=3)], ids=repr)
def test_a_batch_takes_nothing_to_its_device_but_its_draws(a):
    """Torch's device "meta" has no numbers, and stands for a GPU."""

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.update(each.device.type for each in args if isinstance(each, torch.Tensor))
            return function(*args, **(kwargs or {}))

    batches = prepare(images(4, 3, 6, 7).to("meta"), MEAN, STD, a)
    # What is the same for all batches is there after the first.
    for _ in range(2):
        draws, seen = batches.draws(torch.tensor([3, 0]), torch.Generator()).to("meta"), set()
        with Devices():
            batch = batches.augmented(draws)
    assert seen == {"meta"} and batch.shape == (2, 3, 6, 7)


def test_the_moments_are_taken_to_a_device_once():
    one, two = (prepare(images(2, 3, 4, 4, seed), MEAN, STD) for seed in (0, 1))
    assert one.scale.data_ptr() == two.scale.data_ptr()
    assert one.shift.data_ptr() == two.shift.data_ptr() != one.scale.data_ptr()
