"""What a contributor finds: commands that exist, one version, and the same script here and at GitHub."""

import importlib
import importlib.util
import json
import re
import types
from pathlib import Path

import pytest
import yaml  # comes with pre-commit

import reference

ROOT = Path(__file__).parents[2]


def test_every_session_that_is_named_exists_and_every_one_is_named() -> None:
    noxfile = importlib.import_module("noxfile")  # not at the top: a GPU machine collects this file without nox
    sessions = set(noxfile.nox.registry.get())
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"nox -s (\w+)", page)) | set(
        re.findall(r"`(\w+)`", page.split("`nox -l` lists")[1].split(".")[0])
    )
    assert named == sessions
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    run = {name for names in re.findall(r"for session in ([\w ]+);", script) for name in names.split()}
    run |= set(re.findall(r"nox .*-s (\w+)", script))
    assert run
    assert run <= sessions


OTHERS = r"importorskip\(.(transformers|accelerate|peft|lightning)|LIBRARIES\["


def test_tests_of_other_libraries_have_a_session() -> None:
    """Elsewhere they are skipped; and nothing else runs there a second time."""
    noxfile = importlib.import_module("noxfile")
    paths = {f"test_{name}.py" for name in noxfile.INTEGRATIONS}
    others = (path for path in (ROOT / "tests").rglob("test_*.py") if path.name != Path(__file__).name)
    found = {path: path.read_text("utf-8") for path in others}
    assert {path.name for path, text in found.items() if re.search(OTHERS, text)} <= paths
    for path, text in found.items():
        marked = re.search(r"^pytestmark = .*mark\.integration", text, re.M)
        assert ("mark.integration" in text) == (path.name in paths)
        for one in re.findall(r"((?:^@.*\n)*^def test_\w+(?:.*\n)(?:(?!^def |^@).*\n)*)", text, re.M):
            needs = bool(re.search(OTHERS, one))
            assert marked or needs == ("@pytest.mark.integration" in one), one


def test_github_runs_the_same_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert "bash .ci/run" in [step.get("run") for step in workflow["jobs"]["run"]["steps"]]
    assert set(workflow["jobs"]["run"]["strategy"]["matrix"]["python"]) == {"3.11", "3.12"}


def test_a_commit_runs_programs_of_the_linters_session() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    source = (ROOT / "noxfile.py").read_text("utf-8").split("def lint")[1].split("@nox.session")[0]
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert f'session.run("{program}"' in source, hook


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_what_github_reads_is_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text("utf-8"))


def test_the_citation_has_the_version_and_the_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert str(citation["version"]) == reference.__version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_the_container_installs_extras_that_exist() -> None:
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8")
    container = json.loads(re.sub(r"^//.*$", "", text, flags=re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra in re.findall(r"\.\[([\w,]+)\]", container["postCreateCommand"])[0].split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_every_public_name_is_on_a_page_of_the_site() -> None:
    spec = importlib.util.spec_from_file_location("api", ROOT / "docs" / "site" / "api.py")
    assert spec is not None
    assert spec.loader is not None
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    shown = [name.rpartition(".")[2] for names in api.groups().values() for name in names]
    assert set(reference.__all__) - {"optimizers", "recipe"} - api.OLDER <= set(shown)
    for names in api.groups().values():
        for name in names:
            module, _, last = api.where(name).rpartition(".")
            found = getattr(importlib.import_module(module), last)
            assert isinstance(found, types.ModuleType) == (name in api.groups()["Modules"]), name
