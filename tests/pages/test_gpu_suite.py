"""The record of the GPU suite (tests/tools/gpu_suite.py), from pytest's JUnit report."""

from pathlib import Path

from tools import gpu_suite

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ops.casts.test_a" name="test_one[x]" time="0.25"/>
<testcase classname="tests.ops.casts.test_a.TestClass" name="test_two" time="1.0"><failure message="no"/></testcase>
<testcase classname="" name="tests.test_b" time="0.0"><skipped message="not installed"/></testcase>
</testsuite></testsuites>"""


def test_a_module_that_is_skipped_as_a_whole_counts_as_failed(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert gpu_suite.summary(tmp_path / "report.xml") == {
        "test_a": {"passed": 1, "failed": 1, "seconds": 1.2},
        "test_b": {"passed": 0, "failed": 1, "seconds": 0.0},
    }
