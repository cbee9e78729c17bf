"""The counts of tests/tools/count_house.py, on a history and a tree that are small enough to count by hand."""

import subprocess
from pathlib import Path

import pytest
from tools import count_house


def commit(root: Path, *files: str) -> None:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n{len(list(root.rglob('*')))}\n", "utf-8")
    who = ("-c", "user.name=one", "-c", "user.email=one@example.org")
    for words in (("add", "--all"), (*who, "commit", "--quiet", "--message", "one")):
        subprocess.run(["git", "-C", str(root), *words], check=True)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    commit(tmp_path, "reference/shared.py", "reference/ops/library.py")
    op = ("reference/ops/casts/cast.py", "optimized/kernels/casts/cast.cu", "tests/ops/casts/test_cast.py")
    commit(tmp_path, *op, "reference/shared.py", "docs/cast.md", "docs/results/cast.json")
    commit(tmp_path, "reference/ops/casts/without_a_kernel.py", "optimized/kernels/casts/part.cuh")
    return tmp_path


def test_an_ops_commit_is_one_with_definition_and_kernel(history: Path) -> None:
    (found,) = count_house.ops_commits("HEAD", history)
    assert (found["ops"], found["files"], found["others"]) == (["cast"], 4, 1)
    assert count_house.medians([found, {**found, "ops": ["one", "two"]}]) == {"commits": 1, "files": 4, "others": 1}


def test_lines_are_of_code_by_room(history: Path) -> None:
    source = {"reference": 2, "reference/ops": 6, "optimized/kernels": 4}
    assert count_house.lines(history) == {"source": source, "tests": {"tests/ops": 2}}


def test_a_circle_is_found(tmp_path: Path) -> None:
    texts = {"reference/a.py": "from optimized import b", "optimized/b.py": "import reference.a", "optimized/c.py": ""}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).parent.joinpath("__init__.py").touch()
        (tmp_path / name).write_text(f"{text}\n", "utf-8")
    assert count_house.within(tmp_path, count_house.CIRCLES) == [["optimized.b", "reference.a"]]
