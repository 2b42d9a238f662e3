"""A seeded fuzzer for everything that epimer reads: files, folders, answers of servers and mappings.

`python -m fuzz` (with `tests` on the path) runs it; `make fuzz` runs 100,000 cases, `make test` 2,000.
"""
