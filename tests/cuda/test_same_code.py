"""tests/tools/same_code.py tells machine code that differs from code that does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import same_code

from optimized import measure
from optimized.cuda import compiler

KERNEL = """
// %s
constexpr int kUnread = 5;
namespace a { struct Pair { int first, second; }; }
__device__ __forceinline__ float of(const a::Pair& pair, float x) { return x * pair.first + pair.second; }
extern "C" __global__ void one(float* x) { x[threadIdx.x] = of(a::Pair{3, 4}, x[threadIdx.x]); }
"""
OTHER = {
    "comment": KERNEL % "another",
    "names": KERNEL.replace("Pair", "Two").replace("kUnread = 5", "kNobody = 6"),
    "constant": KERNEL.replace("{3, 4}", "{3, 5}"),
    "registers": KERNEL.replace("__global__ void", "__global__ void __launch_bounds__(64)"),
    "arguments": KERNEL.replace("(float* x)", "(float* x, int n)"),
}


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(folder: Path, text: str) -> bytes:
    folder.mkdir(exist_ok=True)
    (folder / "one.cu").write_text(text)
    return compiler.build("one", root=folder, announced=False).cubin


@pytest.mark.parametrize("change", OTHER)
def test_sections_differ_where_the_machine_code_does(change: str, tmp_path: Path, cached: None) -> None:
    texts = {"a": KERNEL, "b": OTHER[change]}
    first, second = (same_code.sections(made(tmp_path / name, text), False) for name, text in texts.items())
    assert any(name.startswith(".text.one") for name in first)
    assert (first == second) == (change in ("comment", "names"))


def test_ptx_is_compared_without_comments_and_internal_names() -> None:
    text = "// by NVVM\n.global .align 4 .u32 _ZN1aE = 4;\n.entry one() { // call\n bra $L__BB0_2; call _Z1f; }"
    same = ".global .align 4 .u32 kB = 5;\n.global .align 1 .u8 kZero;\n.entry one() {\n bra $L__BB7_1; call _Z1g; }"
    assert same_code.plain_ptx(text) == same_code.plain_ptx(same)
    assert not same_code.plain_ptx(text)[1]
    assert same_code.plain_ptx(text) != same_code.plain_ptx(text.replace("bra", "ret"))
    read = same.replace("_Z1g", "kB")
    assert same_code.plain_ptx(read)[1]
    assert same_code.plain_ptx(read) != same_code.plain_ptx(read.replace("= 5", "= 6"))  # one that is read stays


class Told:
    """A tree whose answers are given."""

    def __init__(self, source: str, code: dict[int, str], kernel: str = "cast") -> None:
        self.configurations = [(kernel, {"N": n}) for n in code]
        self.code, self.about = code, {"hashes": {kernel: source}, "nvrtc": "13.0"}

    def ask(self, *requests: object) -> list[object]:
        return list(self._answers(requests))

    def _answers(self, requests: object) -> Iterator[object]:
        for request in requests:  # type: ignore[attr-defined]
            listed = {"listed": self.configurations, **self.about}
            yield listed if request == "list" else {"kind": "cubin", "code": self.code[request[1]["N"]]}


def compared(new: dict[int, str]) -> dict[str, object]:
    trees = Told("1" * 64, {1: "a", 2: "b", 3: "c"}), Told(compiler.source_hash("cast"), new)
    return same_code.compare(trees, ["cast"], whole=False, jobs=1)  # type: ignore[arg-type]


def test_a_kernel_of_which_one_configuration_differs_stays_outdated() -> None:
    result = {"provenance": {"kernels": {"cast": "1" * 64}}}
    same, other = compared({1: "a", 2: "b", 3: "c"}), compared({1: "a", 2: "x", 3: "c"})
    assert measure.outdated(result, same_code.links(same, ("before", "after"))) == []
    assert same_code.links(other, ("before", "after")) == []
    assert measure.outdated(result, same_code.links(other, ("before", "after"))) == ["cast"]
    assert other["kernels"]["cast"]["configurations"] == 3  # type: ignore[index]
    assert [one["before"] for one in other["kernels"]["cast"]["differing"]] == [("cast", {"N": 2})]  # type: ignore[index]


def test_lists_of_other_lengths_are_refused() -> None:
    with pytest.raises(SystemExit, match="list 3 and 2 configurations"):
        compared({1: "a", 2: "b"})


def test_of_several_codes_that_the_compiler_makes_of_one_source_one_in_common_is_enough() -> None:
    class Turns(Told):
        def _answers(self, requests: object) -> Iterator[object]:
            for answer, request in zip(super()._answers(requests), requests, strict=True):  # type: ignore[call-overload]
                again = request != "list" and request[1]["N"] == 2 and request[3] == 2
                yield {**answer, "code": "b"} if again else answer

    trees = Told("1" * 64, {1: "a", 2: "b"}), Turns("2" * 64, {1: "a", 2: "x"})
    found = same_code.compare(trees, ["cast"], whole=False, jobs=1)  # type: ignore[arg-type]
    assert found["kernels"]["cast"]["equal_ptx"] == 2
    trees = Told("1" * 64, {1: "a", 2: "b"}), Turns("2" * 64, {1: "y", 2: "x"})
    found = same_code.compare(trees, ["cast"], whole=False, jobs=1)  # type: ignore[arg-type]
    assert found["kernels"]["cast"]["equal_ptx"] == 1
    assert len(found["kernels"]["cast"]["differing"]) == 1


def program(**texts: str) -> str | None:
    return same_code.words({name.replace("_", "."): text for name, text in texts.items()}, compiler.code_of)


def test_sources_are_the_same_words_whatever_their_lines_and_files() -> None:
    wide = '#include "b.cuh"\n// note\n#define F(x) \\\n    (x + 1)\nint a = F ( 2 ) ; /* */ const char *s = "a  b" ;'
    tall = '#include "folder/c.cuh"\n#define F(x) (x + 1)\nint a =\n    F(2);\nconst char* s = "a  b";'
    header = "#pragma once\nint  b;"
    one = program(a_cu=wide, b_cuh=header)
    assert one is not None
    assert one == same_code.words({"x.cu": tall, "folder/c.cuh": "#pragma once\n\nint b;"}, compiler.code_of)
    for other in (
        wide.replace("2", "3"),
        wide.replace("a  b", "a b"),
        wide.replace("F(x)", "F (x)"),
        wide.replace("= F", "+= F"),
        wide + '\n#ifdef G\n#include "b.cuh"\n#endif',
    ):
        assert program(a_cu=other, b_cuh=header) != one, other
    assert program(a_cu=wide, b_cuh=header.replace("b;", "c;")) != one
    assert program(a_cu=wide + " + +a", b_cuh=header) != program(a_cu=wide + " ++a", b_cuh=header)
    assert program(a_cu="int a = __LINE__;") is None


def test_equal_sources_are_not_compiled() -> None:
    class Alike(Told):
        def __init__(self, source: str, code: dict[int, str]) -> None:
            super().__init__(source, code)
            self.about["words"] = {"cast": "5" * 64}

        def _answers(self, requests: object) -> Iterator[object]:
            for answer, request in zip(super()._answers(requests), requests, strict=True):  # type: ignore[call-overload]
                assert request == "list"
                yield answer

    trees = Alike("1" * 64, {1: "a", 2: "b"}), Alike("2" * 64, {1: "a", 2: "b"})
    found = same_code.compare(trees, ["cast"], whole=True, jobs=1)  # type: ignore[arg-type]
    row = found["kernels"]["cast"]
    assert (row["equal_sources"], row["equal_ptx"], row["cubins"], row["differing"]) == (2, 0, 0, [])
    assert [link["to"] for link in same_code.links(found, ("before", "after"))] == ["2" * 64]


def test_configurations_are_paired_by_what_is_not_zero() -> None:
    old = [("norm", {"KIND": kind}) for kind in (0, 1)]
    new = [("norm", {"KIND": kind, "WHOLE": whole}) for whole in (1, 0) for kind in (1, 0)]
    assert same_code.paired(old, new, ()) == [(old[0], new[3]), (old[1], new[2])]
    with pytest.raises(SystemExit, match="2 and 1 configurations of norm"):
        same_code.paired(old, new[:1], ())
