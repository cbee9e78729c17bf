"""What a wheel says otherwise than the repository: longer names of modules, and a README without links into a clone.

In the repository the packages are `reference` and `optimized`. Two such names at the top of site-packages would clash
with others, so a wheel has `twin_engine.reference` and `twin_engine.optimized`. Relative imports cannot serve both,
because `optimized` imports from `reference`, which is beside it in one place and below the same package in the other.
So the import statements are rewritten when a wheel is built (`rewritten`); nothing is resolved while a program runs.
"""

import ast
import re
from urllib.parse import urljoin

PACKAGE = "twin_engine"
SHORT = ("reference", "optimized")

_RELATIVE = r"\]\((?!https?:|#)([^)\s]+)\)"
_NOTE = (
    "> This page describes the repository. From a package (`pip install twin-engine`) the names begin with\n"
    "> `twin_engine`, as in the examples below. Tests, lessons and the commands with `-e` need a clone.\n\n"
)


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in SHORT


def _statement(node: ast.Import, where: str) -> str:
    """An import statement with long names, which binds what it bound."""
    if len(node.names) != 1:
        raise ValueError(f"{where}: `import` names several modules, one of them ours; one a line is accepted.")
    (alias,) = node.names
    if alias.asname:
        return f"import {PACKAGE}.{alias.name} as {alias.asname}"
    bound, _, rest = alias.name.partition(".")
    return (f"import {PACKAGE}.{alias.name}; " if rest else "") + f"from {PACKAGE} import {bound}"


def rewritten(source: str, path: str) -> str:
    """Python code in which every absolute import of our packages has its long name; nothing else is changed.

    Args:
        source: the code.
        path: where it is from, for the error's sentence.

    Raises:
        ValueError: one `import` statement names several modules, and one of them is ours.
    """
    lines = source.encode().splitlines(keepends=True)  # the columns of ast are bytes
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module):
            row, first = node.lineno - 1, node.col_offset
            line = lines[row]
            lines[row] = line[:first] + re.sub(rb"^from\s+", f"from {PACKAGE}.".encode(), line[first:])
        elif isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            row, first, end = node.lineno - 1, node.col_offset, node.end_col_offset
            new = _statement(node, f"{path}, line {node.lineno}").encode()
            lines[row] = lines[row][:first] + new + lines[row][end:]
    return b"".join(lines).decode()


def exported(source: str) -> list[str]:
    """The names in a module's `__all__`, a list of strings."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError("the module has no `__all__ = [...]`.")


def with_names(source: str, names: list[str]) -> str:
    """Code with `import *` written out, which mypy does not follow where `__all__` is another module's."""
    return re.sub(r"import \*.*", f"import {', '.join(f'{name} as {name}' for name in names)}", source, count=1)


def page(readme: str, source: str | None = None) -> str:
    """README as the page of a package, where a relative link leads nowhere.

    Args:
        readme: its text.
        source: where the repository's files are shown, ending in "/", such as https://host/owner/name/blob/main/; the
            files themselves are where it says "raw" in place of "blob". Without it, links become their text, and
            pictures are left out.
    """
    if source is not None:
        raw = source.replace("/blob/", "/raw/")
        readme = re.sub(rf"(!\[[^\]]*){_RELATIVE}", lambda link: f"{link[1]}]({urljoin(raw, link[2])})", readme)
        text = re.sub(_RELATIVE, lambda link: f"]({urljoin(source, link[1])})", readme)
    else:
        text = re.sub(
            rf"^\[?!\[[^\]]*{_RELATIVE}(?:{_RELATIVE})?\n+", "", readme, flags=re.MULTILINE
        )  # a picture's line
        text = re.sub(rf"\[([^\[\]]+){_RELATIVE}", r"\1", text)
    text = text.replace("import optimized as te", f"import {PACKAGE} as te")
    text = re.sub(r"\b(import|from) (reference|optimized)\b", rf"\1 {PACKAGE}.\2", text)
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n{_NOTE}{rest}"
