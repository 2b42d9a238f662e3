"""Read YAML that strangers wrote beside a model or data, as plain data and in time proportional to its text."""

from __future__ import annotations

from typing import Any

import yaml

DEEPEST = 20  # levels of lists and mappings


class _PlainLoader(yaml.SafeLoader):
    """Plain data: no merge keys, which multiply, and no deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.YAMLError("nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leave merge keys as they are: no constructor knows them, so the text is refused."""


def yaml_value(text: str) -> Any:
    """Return the value of a YAML text; a ValueError says why there is none."""
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, LookupError, AttributeError, RecursionError) as error:  # PyYAML's own of odd tags
        raise ValueError(str(error)) from error
