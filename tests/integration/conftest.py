"""What the tests of whole commands share."""

from chromium import browser  # noqa: F401
