"""Draw characters from the fonts inside matplotlib, and turn drawings into varied pictures.

A master is one character in one face, 48 x 48, in [0, 1]. A picture is 27 x 27, eight bits: a master seen through a
random affine map, over a textured background, with noise.
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
MASTER = 48
SIZE = 34  # of the font, so that almost every character fits the master

SANS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique")
MONO = ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique")
SERIF = ("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic")
STIX = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")
FAMILIES = (SANS, MONO, SERIF, STIX)
"""each in the order regular, bold, italic, bold italic"""


def needed(module: str, package: str) -> Any:
    """Import a module of the `suites` extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"the suite glyphs8 needs {package}; install it: pip install 'epimer[suites]'") from error


def generator(*key: object) -> torch.Generator:
    """Return a source of random numbers that depends on the key alone."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def uniform(n: int, low: float, high: float, rng: torch.Generator) -> Tensor:
    """Return n numbers between low and high."""
    return low + (high - low) * torch.rand(n, generator=rng)


@cache
def _face(name: str) -> tuple[Any, frozenset[int]]:
    """Return a face and the characters it has."""
    folder = Path(needed("matplotlib", "matplotlib").get_data_path()) / "fonts" / "ttf"
    path = str(folder / f"{name}.ttf")
    try:
        known = frozenset(needed("matplotlib.ft2font", "matplotlib").FT2Font(path).get_charmap())
        return needed("PIL.ImageFont", "pillow").truetype(path, SIZE), known
    except OSError as error:
        raise DataError(f"this matplotlib has no font {name}; install matplotlib 3.8 or newer.") from error


def has(face: str, character: str) -> bool:
    """Whether a face has a character of its own."""
    return ord(character) in _face(face)[1]


@cache
def master(character: str, face: str) -> Tensor:
    """Draw one character in the middle of a master."""
    if not has(face, character):
        raise DataError(f"the font {face} has no {character!r}; install matplotlib 3.8 or newer.")
    image = needed("PIL.Image", "pillow").new("L", (MASTER, MASTER))
    draw = needed("PIL.ImageDraw", "pillow").Draw(image)
    draw.text((MASTER / 2, MASTER / 2), character, fill=255, font=_face(face)[0], anchor="mm")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(MASTER, MASTER).float() / 255
    return _centred(pixels)


def _centred(pixels: Tensor) -> Tensor:
    """Shift a drawing so that the box around its ink lies in the middle."""
    shifts = []
    for ink in (pixels.amax(1), pixels.amax(0)):
        where = ink.nonzero().flatten()
        shifts.append(0 if len(where) == 0 else (MASTER - 1 - int(where[0]) - int(where[-1])) // 2)
    return pixels.roll(shifts, (0, 1))


def masters(characters: Sequence[str], faces: Sequence[str]) -> Tensor:
    """Return masters of all characters in all faces: C x F x 48 x 48."""
    return torch.stack([torch.stack([master(character, face) for face in faces]) for character in characters])


@dataclass(frozen=True)
class Jitter:
    """How far the affine map goes either way."""

    angle: float = 8.0
    """degrees"""
    scale: tuple[float, float] = (1.0, 1.3)
    shear: float = 0.1
    shift: float = 0.06
    """of the picture's side"""


def warp(drawings: Tensor, rng: torch.Generator, jitter: Jitter, at: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """See each of n x 48 x 48 drawings through an affine map of its own, centred at `at` (in [-1, 1]): n x 27 x 27."""
    n = len(drawings)
    angle = uniform(n, -jitter.angle, jitter.angle, rng) * math.pi / 180
    grow = uniform(n, *jitter.scale, rng)
    shear = uniform(n, -jitter.shear, jitter.shear, rng)
    x, y = (centre + uniform(n, -2 * jitter.shift, 2 * jitter.shift, rng) for centre in at)
    cos, sin = torch.cos(angle) / grow, torch.sin(angle) / grow
    A = torch.stack([torch.stack([cos, shear / grow - sin], 1), torch.stack([sin, cos], 1)], 1)
    theta = torch.cat([A, -A @ torch.stack([x, y], 1)[:, :, None]], 2)
    grid = functional.affine_grid(theta, [n, 1, SIDE, SIDE], align_corners=False)
    return functional.grid_sample(drawings[:, None], grid, align_corners=False)[:, 0]


@dataclass(frozen=True)
class Scene:
    """What lies behind and over the ink."""

    contrast: tuple[float, float] = (0.45, 0.9)
    texture: float = 0.1
    """standard deviation of the background, which varies slowly over the picture"""
    noise: float = 0.06
    inverted: bool = False
    """dark ink on light ground"""


def photograph(ink: Tensor, rng: torch.Generator, scene: Scene) -> Tensor:
    """Put n x 27 x 27 ink in [0, 1] over a background: n x 27 x 27, eight bits."""
    n = len(ink)
    coarse = torch.randn(n, 1, 4, 4, generator=rng) * scene.texture
    ground = functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]
    level = uniform(n, 0.05, 0.25, rng)[:, None, None] + ground
    picture = level + uniform(n, *scene.contrast, rng)[:, None, None] * ink
    if scene.inverted:
        picture = 1 - picture
    picture = picture + scene.noise * torch.randn(n, SIDE, SIDE, generator=rng)
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8)
