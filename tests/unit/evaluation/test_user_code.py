"""Names of functions in the user's code; what fails in such code is in tests/integration/test_own_code.py."""

from epimer.evaluation.user_code import is_entry_point


def test_entry_points_are_told_from_files_and_names():
    assert all(map(is_entry_point, ("a:b", "my_package.my_suite:make")))
    assert not any(
        map(is_entry_point, ("suite.yaml", "glyphs8", "a:b:c", "../x:y", "a b:c", ":make", "C:/suite", "1a:b"))
    )
