"""What must not be given to a public function is refused in one line that names it."""

import importlib
import inspect
import pkgutil
import re

import pytest
import torch
from bad_values import OPEN_ROWS, ROWS, Bad

import transformer

EVERY = "must be of type|must be a whole number|must be a finite number"
CASES = [
    pytest.param(row, name, i, id=f"{row}-{name}-{i}")
    for row, (_, arguments) in ROWS.items()
    if not OPEN_ROWS(row)
    for name, bad in arguments.items()
    if isinstance(bad, Bad)
    for i in range(len(bad.values))
]


def in_message(value) -> str:
    """A pattern of what a message may say of a value."""
    if isinstance(value, torch.Tensor):
        said = [str(tuple(value.shape)), str(value.dtype), "the first at"]
        if value.is_meta:  # it has no numbers
            return "meta"
        said += [str(x) for x in value.flatten()[:9].tolist()]
    elif isinstance(value, int | float | str | None):
        said = [repr(value), str(value), type(value).__name__]
    else:  # of what holds others, or is not printed
        return "got "
    return "|".join(re.escape(words) for words in said)


def run(function, arguments):
    """Call it, and read it to its end."""
    result = function(**arguments)
    return list(result) if inspect.isgenerator(result) else result


@pytest.mark.parametrize(
    "name", [name for name in ROWS if not OPEN_ROWS(name)], ids=lambda name: name
)
def test_call_of_the_table_works(name):
    run(*ROWS[name].make())
    assert ROWS[name].bad


@pytest.mark.parametrize("name, argument, i", CASES)
def test_bad_value_is_refused_in_one_line_that_names_its_argument(name, argument, i):
    row = ROWS[name]
    bad, (function, arguments) = row.bad[argument], row.make()
    value = bad.values[i]
    with pytest.raises((TypeError, ValueError, OSError, LookupError)) as caught:
        run(function, {**arguments, argument: value})
    said = str(caught.value)
    assert said and "\n" not in said
    assert re.search(rf"\b{bad.name or argument}\b", said)
    assert re.search(f"{bad.words}|{EVERY}", said)
    assert re.search(in_message(value), said)


def public():
    """Each public function or class as module.name, with its arguments."""
    for module in pkgutil.iter_modules(transformer.__path__):
        loaded = importlib.import_module(f"transformer.{module.name}")
        for name in getattr(loaded, "__all__", ()):
            if callable(thing := getattr(loaded, name)):
                yield f"{module.name}.{name}", [*inspect.signature(thing).parameters]


@pytest.mark.parametrize("name, arguments", public(), ids=lambda x: str(x)[:40])
def test_every_argument_is_in_the_table_or_said_to_be_open(name, arguments):
    if not OPEN_ROWS(name):
        assert {*arguments} == {*ROWS[name].bad}
