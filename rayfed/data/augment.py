"""Batches: images are augmented, each with its own draw; other examples stay as they are.

Order: random crop, horizontal flip, normalisation, Cutout. Draws come from a CPU generator, so a
seed gives the same augmentation on every device.

Shapes: `n` images of a client, `B` of a batch, `C` channels, `H` x `W` pixels, `p` pixels of
padding.

>>> images = torch.arange(2 * 16, dtype=torch.uint8).reshape(2, 1, 4, 4)
>>> batches = prepare(images, mean=(0.0,), std=(1 / 255,), augment=Augment(crop=1, flip=True))
>>> batches.plain(torch.tensor([1]))[0, 0, 0].tolist()
[16.0, 17.0, 18.0, 19.0]
>>> draws = batches.draws(torch.tensor([1]), torch.Generator().manual_seed(0))
>>> batches.augmented(draws)[0, 0, 0].tolist()
[22.0, 21.0, 20.0, 0.0]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.base.errors import InputError
from rayfed.data.settings import Augment


@dataclass(frozen=True, eq=False)
class Batches:
    """A client's images, ready for batches; made by `prepare`."""

    # The padded images are uint8 (n, C, H + 2p, W + 2p), contiguous.
    padded: Tensor
    # The scale is 1 / (255 std), float32 (1, C, 1, 1).
    scale: Tensor
    # The shift is -mean / std, float32 (1, C, 1, 1).
    shift: Tensor
    augment: Augment

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape (C, H, W) of an image of a batch."""
        channels, height, width = self.padded.shape[1:]
        return channels, height - 2 * self.augment.crop, width - 2 * self.augment.crop

    @cached_property
    def _window(self) -> Tensor:
        """Return where the pixels of a window are in a padded image, int64 (2, C H W).

        Positions count from the window's first pixel. The second row has the mirrored window.
        """
        _, height, width = self.shape
        positions = torch.arange(self.padded[0].numel(), device=self.padded.device)
        window = positions.view(self.padded.shape[1:])[:, :height, :width]
        return torch.stack([window, window.flip(2)]).view(2, -1)

    @cached_property
    def _line(self) -> Tensor:
        """Return 0, 1, ... for each line and each column of an image, int64 (max(H, W),)."""
        return torch.arange(max(self.shape[1:]), device=self.padded.device)

    def plain(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return the images `rows` (B,), or all, normalised only, float32 (B, C, H, W)."""
        _, height, width = self.shape
        start = self.augment.crop
        images = self.padded[rows, :, start : start + height, start : start + width]
        return self._normalised(images)

    def draws(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return the rows (B,) of a batch with what is drawn for each image, int64, on the CPU.

        They are one tensor, so that one copy takes them to a GPU. Without augmentation it has the
        rows alone, (1, B). With it, (5, B): the rows, the first pixel of each window, the flip, and
        the first line and column of the Cutout. Draws come from the CPU `generator`.
        """
        augment = self.augment
        if augment.off:
            return rows[None]
        _, height, width = self.shape
        size = (len(rows),)
        zeros = torch.zeros(size, dtype=torch.int64)

        def draw(below: int, enabled: object) -> Tensor:
            return torch.randint(below, size, generator=generator) if enabled else zeros

        top = draw(2 * augment.crop + 1, augment.crop)
        left = draw(2 * augment.crop + 1, augment.crop)
        flip = draw(2, augment.flip)
        centre_y = draw(height, augment.cutout)
        centre_x = draw(width, augment.cutout)
        # Positions count over the pixels of all images.
        start = rows * self.padded[0].numel() + top * self.padded.shape[3] + left
        half = augment.cutout // 2
        return torch.stack([rows, start, flip, centre_y - half, centre_x - half])

    def augmented(self, draws: Tensor) -> Tensor:
        """Return a batch of images, augmented, float32 (B, C, H, W).

        `draws` are those of the method `draws`, on the device of the images.
        """
        if self.augment.off:
            return self.plain(draws[0])
        images = self._normalised(self._windows(start=draws[1], flip=draws[2]))
        return self._cut_out(images, corner=draws[3:]) if self.augment.cutout else images

    def _windows(self, start: Tensor, flip: Tensor) -> Tensor:
        """Return the windows (B, C, H, W) that begin at pixel `start` (B,).

        A window is mirrored if its `flip` (B,) is 1.
        """
        positions = self._window.index_select(0, flip).add_(start[:, None])
        # One gather over flat positions takes a third of the time of indexing four dimensions.
        pixels = self.padded.view(-1).index_select(0, positions.view(-1))
        return pixels.view(-1, *self.shape)

    def _normalised(self, images: Tensor) -> Tensor:
        """Return images (B, C, H, W) of bytes as float32, normalised."""
        return images.float().mul_(self.scale).add_(self.shift)

    def _cut_out(self, images: Tensor, corner: Tensor) -> Tensor:
        """Set a square to 0 in place, clipped at the borders; `corner` (2, B).

        Source: DeVries & Taylor, 2017.
        """
        _, height, width = self.shape
        offsets = self._line - corner[:, :, None]  # (2, B, max(H, W))
        lines, columns = (offsets >= 0) & (offsets < self.augment.cutout)
        square = lines[:, :height, None] & columns[:, None, :width]  # (B, H, W)
        return images.masked_fill_(square[:, None], 0)


@dataclass(frozen=True, eq=False)
class Rows:
    """A client's tokens or vectors, ready for batches."""

    # The examples have the shape (n, ...), as a model takes them.
    ready: Tensor

    def plain(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return the examples `rows` (B,), or all."""
        return self.ready[rows]

    def draws(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return the rows alone, int64 (1, B), as only images are augmented."""
        return rows[None]

    def augmented(self, draws: Tensor) -> Tensor:
        """Return the same as `plain`."""
        return self.plain(draws[0])


def prepare(
    images: Tensor, mean: Sequence[float], std: Sequence[float], augment: Augment | None = None
) -> Batches:
    """Pad a client's images once, for all its batches of a round.

    Images are uint8 (n, C, H, W) on any device. `mean` and `std` are per channel, of pixels in [0,
    1].
    """
    augment = augment or Augment()
    padding = [augment.crop] * 4
    padded = images
    if augment.crop and augment.crop_padding == "reflect":
        # Reflection is not defined for bytes; halves hold 0..255 exactly.
        padded = F.pad(images.half(), padding, mode="reflect").to(torch.uint8)
    elif augment.crop:
        padded = F.pad(images, padding)
    scales = tuple(1 / (255 * deviation) for deviation in std)
    shifts = tuple(-centre / deviation for centre, deviation in zip(mean, std, strict=True))
    scale, shift = (kept(values, torch.float32, images.device) for values in (scales, shifts))
    return Batches(padded.contiguous(), scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1), augment)


@lru_cache(maxsize=16)
def kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a vector on a device, where it is kept. Do not write to it.

    Each copy of them would wait for the GPU, in each batch of an evaluation.
    """
    return torch.tensor(numbers, dtype=dtype, device=device)


def refuse_too_small(height: int, width: int, augment: Augment) -> None:
    """Raise InputError if images are too small to reflect as much as the crop asks for."""
    if augment.crop_padding == "reflect" and augment.crop >= min(height, width):
        largest = min(height, width) - 1
        raise InputError(
            f"data.augment.crop = {augment.crop}: images of {height} x {width} pixels reflect at "
            f"most {largest}"
        )
