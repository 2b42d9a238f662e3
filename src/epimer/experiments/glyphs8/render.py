"""Draw characters from the fonts inside matplotlib, and turn the drawings into varied images.

A drawing is one character in one face, 48 x 48, in [0, 1]. An image is 27 x 27, eight bits: a drawing under a random
affine map, over a textured background, with noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from epimer.errors import DataError

SIDE = 27
DRAWING_SIDE = 48
FONT_SIZE = 34  # so that almost every character fits the drawing

SANS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique")
MONO = ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique")
SERIF = ("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic")
STIX = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")
ALL_FACES = (*SANS, *MONO, *SERIF, *STIX)


def import_extra(module: str, package: str) -> Any:
    """Import a module of the `suites` extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"the suite glyphs8 needs {package}; install it: pip install 'epimer[suites]'") from error


def seeded_generator(*key: object) -> torch.Generator:
    """Return a random number generator that is seeded by the key alone."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def uniform(n: int, low: float, high: float, rng: torch.Generator) -> Tensor:
    """Return n random numbers between low and high."""
    return low + (high - low) * torch.rand(n, generator=rng)


@cache
def _face(name: str) -> tuple[Any, frozenset[int]]:
    """Return a font face and the code points it has."""
    folder = Path(import_extra("matplotlib", "matplotlib").get_data_path()) / "fonts" / "ttf"
    path = str(folder / f"{name}.ttf")
    try:
        known = frozenset(import_extra("matplotlib.ft2font", "matplotlib").FT2Font(path).get_charmap())
        return import_extra("PIL.ImageFont", "pillow").truetype(path, FONT_SIZE), known
    except OSError as error:
        raise DataError(f"this matplotlib has no font {name}; install matplotlib 3.8 or newer.") from error


def has_glyph(face: str, character: str) -> bool:
    """Whether a face has a glyph for a character."""
    return ord(character) in _face(face)[1]


@cache
def draw_character(character: str, face: str) -> Tensor:
    """Draw one character in the middle of 48 x 48 pixels."""
    if not has_glyph(face, character):
        raise DataError(f"the font {face} has no {character!r}; install matplotlib 3.8 or newer.")
    image = import_extra("PIL.Image", "pillow").new("L", (DRAWING_SIDE, DRAWING_SIDE))
    draw = import_extra("PIL.ImageDraw", "pillow").Draw(image)
    draw.text((DRAWING_SIDE / 2, DRAWING_SIDE / 2), character, fill=255, font=_face(face)[0], anchor="mm")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return _centred(pixels.view(DRAWING_SIDE, DRAWING_SIDE).float() / 255)


def _centred(pixels: Tensor) -> Tensor:
    """Shift a drawing so that the box around its ink lies in the middle."""
    shifts = []
    for ink in (pixels.amax(1), pixels.amax(0)):
        where = ink.nonzero().flatten()
        shifts.append(0 if len(where) == 0 else (DRAWING_SIDE - 1 - int(where[0]) - int(where[-1])) // 2)
    return pixels.roll(shifts, (0, 1))


def draw_characters(characters: Sequence[str], faces: Sequence[str]) -> Tensor:
    """Draw all characters in all faces: C x F x 48 x 48."""
    return torch.stack([torch.stack([draw_character(character, face) for face in faces]) for character in characters])


@dataclass(frozen=True)
class Jitter:
    """The ranges of random affine maps."""

    angle: float = 8.0
    """degrees"""
    scale: tuple[float, float] = (1.0, 1.3)
    shear: float = 0.1
    shift: float = 0.06
    """as a fraction of the image's side"""


def warp(drawings: Tensor, rng: torch.Generator, jitter: Jitter, centre: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """Apply a random affine map to each of n x 48 x 48 drawings, moved to `centre` (in [-1, 1]): n x 27 x 27."""
    n = len(drawings)
    angle = uniform(n, -jitter.angle, jitter.angle, rng) * math.pi / 180
    grow = uniform(n, *jitter.scale, rng)
    shear = uniform(n, -jitter.shear, jitter.shear, rng)
    x, y = (middle + uniform(n, -2 * jitter.shift, 2 * jitter.shift, rng) for middle in centre)
    cos, sin = torch.cos(angle) / grow, torch.sin(angle) / grow
    A = torch.stack([torch.stack([cos, shear / grow - sin], 1), torch.stack([sin, cos], 1)], 1)
    theta = torch.cat([A, -A @ torch.stack([x, y], 1)[:, :, None]], 2)
    grid = functional.affine_grid(theta, [n, 1, SIDE, SIDE], align_corners=False)
    return functional.grid_sample(drawings[:, None], grid, align_corners=False)[:, 0]


@dataclass(frozen=True)
class Background:
    """The background behind the ink, and the noise over both."""

    contrast: tuple[float, float] = (0.45, 0.9)
    texture: float = 0.1
    """standard deviation of the background, which varies slowly over the image"""
    noise: float = 0.06
    inverted: bool = False
    """dark ink on light ground"""


def add_background(ink: Tensor, rng: torch.Generator, background: Background) -> Tensor:
    """Put n x 27 x 27 ink in [0, 1] over random backgrounds: n x 27 x 27, eight bits."""
    n = len(ink)
    coarse = torch.randn(n, 1, 4, 4, generator=rng) * background.texture
    ground = functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]
    level = uniform(n, 0.05, 0.25, rng)[:, None, None] + ground
    image = level + uniform(n, *background.contrast, rng)[:, None, None] * ink
    if background.inverted:
        image = 1 - image
    image = image + background.noise * torch.randn(n, SIDE, SIDE, generator=rng)
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)
