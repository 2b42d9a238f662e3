"""A checkpoint as a state dict that reads its tensors on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is accessed, and kept in memory from then on if `keep`.

    `headers` are tensors without data; `ties` map a name to the one whose tensor it shares, when it is kept, too.
    """

    def __init__(
        self,
        headers: Mapping[str, Tensor],
        read: Callable[[str], Tensor],
        *,
        keep: bool = False,
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self.headers, self._read, self._ties = headers, read, ties or {}
        self._kept: dict[str, Tensor] | None = {} if keep else None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.headers:
            raise KeyError(name)
        if self._kept is None:
            return self._read(name)
        shared = self._ties.get(name, name)
        key = shared if shared in self.headers else name
        if key not in self._kept:
            self._kept[key] = self._read(key)
        return self._kept[key]

    def __contains__(self, name: object) -> bool:
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)
