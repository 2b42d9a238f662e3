"""The head of a model card: known words are taken over, and whatever else stands there is passed over."""

import pytest

from epimer.checkpoints.cards import card_head


def test_known_words_are_taken_over(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\npipeline_tag: [text-generation]\nother: 3\n---\n# Title\n")
    assert card_head(tmp_path) == {"license": "mit", "pipeline_tag": "text-generation"}


@pytest.mark.parametrize(
    "value",
    ["!!bool maybe", "!!timestamp x", "!!int ''", "!!float ''", "!!python/object:os.system x", "0x" + "f" * 4000,
     "7" * 5000, "2001-99-99", "[" * 3000, "&a [*a]", "a b", "\0", "<script>", "null"],
)  # fmt: skip
def test_what_is_no_word_is_passed_over(tmp_path, value):
    (tmp_path / "README.md").write_text(f"---\nlicense: {value}\n---\n")
    assert card_head(tmp_path) == {}
