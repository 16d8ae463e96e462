"""A module of the package with all of mutmut's mutants in it, one of which can be on.

mutmut leaves decorated functions alone, as their decorators run at definition. Here the
decorators are taken off before it reads the module, and put back on what it wrote.

mutmut reads `[tool.mutmut]` of pyproject.toml in the current folder.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OWN = ("staticmethod", "classmethod")  # alone, mutmut takes these


@dataclass(frozen=True)
class Mutated:
    """A module with mutants: their names, and the lines of each in the code."""

    code: str
    names: list[str]
    spans: dict[str, tuple[int, int]]

    def change(self, name: str) -> dict[str, str]:
        """The lines that a mutant changes: as they were, and as they are now."""
        origin = name.partition("__mutmut_")[0] + "__mutmut_orig"
        was, now = (self.body(one) for one in (origin, name))
        marked = [line for line in difflib.ndiff(was, now) if line[:2] in ("- ", "+ ")]
        sides = ("\n".join(x[2:].strip() for x in marked if x[0] == s) for s in "-+")
        return dict(zip(("was", "now"), sides, strict=True))

    def body(self, name: str) -> list[str]:
        """The lines of a generated function, its own name apart."""
        start, end = self.spans[name]
        return [
            line.replace(name, "f") for line in self.code.split("\n")[start - 1 : end]
        ]


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module, with their dotted names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def bare(source: str) -> tuple[str, list[str]]:
    """The module without decorators of functions, and the lines that put them back."""
    lines, again = source.split("\n"), []
    for name, function in functions(ast.parse(source)):
        decorators = [ast.unparse(one) for one in function.decorator_list]
        if not decorators or (len(decorators) == 1 and decorators[0] in OWN):
            continue
        owner, _, attribute = name.rpartition(".")
        put_back = f"{owner}.__dict__[{attribute!r}]" if owner else name
        for node, text in zip(function.decorator_list, decorators, strict=True):
            if text not in OWN:  # stays, for mutmut; what it returns is unwrapped below
                for i in range(node.lineno - 1, node.end_lineno):
                    lines[i] = ""
        kept = next((text for text in decorators if text in OWN), None)
        put_back = f"{put_back}.__func__" if kept else put_back
        for text in reversed(decorators):
            put_back = f"{text}({put_back})"
        again.append(f"{name} = {put_back}")
    return "\n".join(lines), again


def mutate(filename: str, source: str) -> Mutated:
    """All mutants of a module, in one module."""
    from mutmut.mutation.file_mutation import mutate_file_contents  # not in all locks

    plain, again = bare(source)
    made = mutate_file_contents(filename, plain)
    spans = {
        name: (span.start, span.end)
        for name, span in made.line_span_by_function_name.items()
    }
    code = made.code + "\n" + "\n".join(again) + "\n"
    return Mutated(code, list(made.mutant_names), spans)


def kept(root: Path, filename: str, cache: Path) -> Mutated:
    """All mutants of a file, which takes mutmut a while; kept in another file."""
    if not cache.is_file():
        made = mutate(filename, (root / filename).read_text(encoding="utf-8"))
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(vars(made)), encoding="utf-8")
    return Mutated(**json.loads(cache.read_text(encoding="utf-8")))


def plain_name(mutant: str) -> str:
    """`xǁRoPEǁat__mutmut_3` as `RoPE.at 3`."""
    function, _, number = mutant.partition("__mutmut_")
    return f"{mangled(function)} {number}"


def mangled(function: str) -> str:
    """`xǁRoPEǁat` as `RoPE.at`, `x_attention` as `attention`."""
    return function.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
