"""A pytest plugin: skip a test whose text or weights are not installed.

Only `make test-gpu` uses it, where nothing can be installed. In `make test` an absent
carrier is a failure.
"""

import re

import pytest

ABSENT = re.compile(r"is not installed: pip install --no-deps (\S+)$")


def skip_if_absent():
    """Finish a phase of a test; a carrier that is not here ends it as skipped."""
    try:
        return (yield)
    except FileNotFoundError as error:
        absent = ABSENT.search(str(error))
        if absent is None:
            raise
        pytest.skip(f"absent: {absent[1]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Fixtures read carriers too."""
    return (yield from skip_if_absent())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """The test itself."""
    return (yield from skip_if_absent())
