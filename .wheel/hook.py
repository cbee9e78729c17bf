"""What hatchling asks while it builds: the files of a wheel or of an editable install, and the page of the package.

wheel             everything below twin_engine/: the two packages with long names, the recorded results, and the
                  kernels' binaries if `python -m optimized.commands compile --wheel` has made them
editable install  the repository itself, with its short names, and twin_engine as another name of the same modules
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import long_names  # noqa: E402

sys.path.remove(str(HERE))


def _digest(folder: Path) -> str:
    """A digest of the kernels and of what compiles them; `optimized.cuda.wheel_cubins.digest` computes the same."""
    digest = hashlib.sha256((folder / "cuda" / "compiler.py").read_bytes())
    for path in sorted(path for path in (folder / "kernels").rglob("*.cu*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _copy_binaries(optimized: Path) -> None:
    """Copy the kernels' binaries into a wheel's `optimized`, if there are any."""
    binaries = HERE / "cubins"
    if not binaries.is_dir():
        return
    about = binaries / "about.json"
    if not about.is_file() or json.loads(about.read_text())["kernels"] != _digest(optimized):
        raise RuntimeError(
            f"{binaries} does not have the binaries of these kernels, or not all: make them again with "
            f"`python -m optimized.commands compile --wheel`, or remove the folder."
        )
    shutil.copytree(binaries, optimized / "cubins", ignore=shutil.ignore_patterns(".*"))


class BuildHook(BuildHookInterface):  # type: ignore[misc]
    """Puts the files together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "standard" for a wheel, or "editable"."""
        root = Path(self.root)
        self._made = tempfile.TemporaryDirectory()
        made = Path(self._made.name)
        if version == "editable":
            shutil.copyfile(HERE / "checkout.py", made / "__init__.py")
            build_data["force_include_editable"] = {str(made): long_names.PACKAGE}
            return
        for name in long_names.SHORT:
            shutil.copytree(root / name, made / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        names = long_names.exported((root / "reference" / "__init__.py").read_text("utf-8"))
        (made / "__init__.py").write_text(long_names.with_names((HERE / "twin_engine.py").read_text("utf-8"), names))
        shutil.copyfile(made / "reference" / "py.typed", made / "py.typed")
        pages = shutil.ignore_patterns(".*", "*.md")
        shutil.copytree(root / "docs" / "results", made / "optimized" / "results", ignore=pages)
        _copy_binaries(made / "optimized")
        for path in made.rglob("*.py"):
            code = long_names.rewritten(path.read_text("utf-8"), str(path.relative_to(made)))
            path.write_text(code, "utf-8")
        build_data["force_include"][str(made)] = long_names.PACKAGE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was put together."""
        self._made.cleanup()


class MetadataHook(MetadataHookInterface):  # type: ignore[misc]
    """README, changed into the page of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        source = metadata.get("urls", {}).get("Files")  # in pyproject.toml; today it has no address of the repository
        text = long_names.page((Path(self.root) / "README.md").read_text("utf-8"), source)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
