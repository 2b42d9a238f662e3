"""Everything that epimer reads, each with valid files, damage to them, and what must hold of the result."""

from fuzz.harness import Reader
from fuzz.readers import checkpoints, foreign, mappings, measured, networks, remote, sidecars, strangers, texts

READERS: dict[str, Reader] = {
    reader.name: reader
    for module in (checkpoints, sidecars, remote, measured, foreign, texts, networks, mappings, strangers)
    for reader in module.READERS
}
