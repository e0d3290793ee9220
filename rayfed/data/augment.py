"""Batches: augmentation of whole batches of images, each image with its own draw; other examples as
they are.

Order: random crop, horizontal flip, normalisation, Cutout. Draws come from a CPU generator, so that
a seed gives the same augmentation on every device.

Shapes: `n` images of a client, `B` of a batch, `C` channels, `H` x `W` pixels, `p` pixels of
padding.

>>> images = torch.arange(2 * 16, dtype=torch.uint8).reshape(2, 1, 4, 4)
>>> batches = prepare(images, mean=(0.0,), std=(1 / 255,), augment=Augment(crop=1, flip=True))
>>> batches.plain(torch.tensor([1]))[0, 0, 0].tolist()
[16.0, 17.0, 18.0, 19.0]
>>> batches.augmented(torch.tensor([1]), torch.Generator().manual_seed(0))[0, 0, 0].tolist()
[22.0, 21.0, 20.0, 0.0]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.base.errors import InputError
from rayfed.data.settings import Augment


@dataclass(frozen=True, eq=False)
class Batches:
    """A client's images, ready for batches; made by `prepare`."""

    # uint8 (n, C, H + 2p, W + 2p), contiguous.
    padded: Tensor
    # float32 (1, C, 1, 1): 1 / (255 std).
    scale: Tensor
    # float32 (1, C, 1, 1): -mean / std.
    shift: Tensor
    augment: Augment

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image of a batch."""
        channels, height, width = self.padded.shape[1:]
        return channels, height - 2 * self.augment.crop, width - 2 * self.augment.crop

    @cached_property
    def _window(self) -> Tensor:
        """Where the pixels of a window are in a padded image, from its first pixel; and mirrored:
        int64 (2, C H W).
        """
        _, height, width = self.shape
        at = torch.arange(self.padded[0].numel(), device=self.padded.device).view(
            self.padded.shape[1:]
        )
        at = at[:, :height, :width]
        return torch.stack([at, at.flip(2)]).view(2, -1)

    @cached_property
    def _line(self) -> Tensor:
        """0, 1, ... for each line and each column of an image: int64 (max(H, W),)."""
        return torch.arange(max(self.shape[1:]), device=self.padded.device)

    def plain(self, rows: Tensor) -> Tensor:
        """The images `rows` (B,), normalised only, float32 (B, C, H, W)."""
        _, height, width = self.shape
        p = self.augment.crop
        rows = rows.to(self.padded.device, non_blocking=True)
        return self._normalised(self.padded[rows, :, p : p + height, p : p + width])

    def augmented(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """The images `rows` (B,), augmented with draws from the CPU `generator`, float32 (B, C, H,
        W).
        """
        a = self.augment
        if a.off:
            return self.plain(rows)
        _, height, width = self.shape
        size = (len(rows),)
        off = torch.zeros(size, dtype=torch.int64)

        def draw(below: int, on: object) -> Tensor:
            return torch.randint(below, size, generator=generator) if on else off

        top, left, flip = (
            draw(2 * a.crop + 1, a.crop),
            draw(2 * a.crop + 1, a.crop),
            draw(2, a.flip),
        )
        y, x = draw(height, a.cutout), draw(width, a.cutout)
        # The window's, in all images.
        first = rows.cpu() * self.padded[0].numel() + top * self.padded.shape[3] + left
        # What is computed here, before the only transfer, is not an operation that a GPU waits for.
        of_batch = torch.stack([first, flip, y - a.cutout // 2, x - a.cutout // 2])
        of_batch = of_batch.to(self.padded.device, non_blocking=True)
        images = self._normalised(self._windows(first=of_batch[0], flip=of_batch[1]))
        return self._cut_out(images, corner=of_batch[2:]) if a.cutout else images

    def _windows(self, first: Tensor, flip: Tensor) -> Tensor:
        """The (H, W) windows that begin at pixel `first`, mirrored where `flip`; both (B,) to (B,
        C, H, W).
        """
        at = self._window.index_select(0, flip).add_(first[:, None])
        # One gather over flat positions takes a third of the time of indexing four dimensions.
        return self.padded.view(-1).index_select(0, at.view(-1)).view(-1, *self.shape)

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().mul_(self.scale).add_(self.shift)

    def _cut_out(self, images: Tensor, corner: Tensor) -> Tensor:
        """Set a square to 0 in place, clipped at the borders; `corner` (2, B).

        DeVries & Taylor, 2017.
        """
        _, height, width = self.shape
        into = self._line - corner[:, :, None]  # (2, B, max(H, W))
        lines, columns = (into >= 0) & (into < self.augment.cutout)
        return images.masked_fill_((lines[:, :height, None] & columns[:, None, :width])[:, None], 0)


@dataclass(frozen=True, eq=False)
class Rows:
    """A client's tokens or vectors, ready for batches."""

    ready: Tensor  # (n, ...), as a model takes them

    def plain(self, rows: Tensor) -> Tensor:
        """The examples `rows` (B,)."""
        return self.ready[rows.to(self.ready.device, non_blocking=True)]

    def augmented(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """The same: only images are augmented."""
        return self.plain(rows)


def prepare(
    images: Tensor, mean: Sequence[float], std: Sequence[float], augment: Augment | None = None
) -> Batches:
    """Pad a client's images, uint8 (n, C, H, W) on any device, once, for all its batches of a
    round.

    `mean` and `std` are per channel, of pixels in [0, 1].
    """
    augment = augment or Augment()
    p = augment.crop
    if p and augment.crop_padding == "reflect":
        # Reflection is not defined for bytes; halves hold 0..255 exactly.
        padded = F.pad(images.half(), (p, p, p, p), mode="reflect").to(torch.uint8)
    else:
        padded = F.pad(images, (p, p, p, p)) if p else images
    scale = torch.tensor([1 / (255 * s) for s in std], device=images.device).view(1, -1, 1, 1)
    shift = torch.tensor(
        [-m / s for m, s in zip(mean, std, strict=True)], device=images.device
    ).view(1, -1, 1, 1)
    return Batches(padded.contiguous(), scale, shift, augment)


def refuse_too_small(height: int, width: int, augment: Augment) -> None:
    """Raises InputError if images are too small to reflect as much as the crop asks for."""
    if augment.crop_padding == "reflect" and augment.crop >= min(height, width):
        most = min(height, width) - 1
        raise InputError(
            f"data.augment.crop = {augment.crop}: images of {height} x {width} pixels reflect at "
            f"most {most}"
        )
