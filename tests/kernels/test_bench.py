"""The benchmark's cases run; how long they take is not for a test."""

import pytest

from vllm_arm_cpu import bench


def test_cases_of_the_documents_exist() -> None:
    names = bench.all_cases()
    for name in ("attn_q1_ctx512", "attn_q64_ctx256", "cache_write_64", "bf16_m1", "bf16_m64", "w8a8_m1", "w4a8_m1"):
        assert name in names


SOME = (
    *("attn_q1_ctx512", "cache_write_1", "cache_write_1_int8", "bf16_m1", "rms_norm_1x4096"),
    *("w8a8_m1", "w8a8_moe_m1", "w4a8_g128_m16", "w4a8_kai_m1", "w4a8_moe_g128_m1", "w4a16_m4"),
)


@pytest.mark.parametrize("name", SOME)
def test_case_runs(name: str) -> None:
    call, bytes_read = bench.all_cases()[name]()
    assert bytes_read > 0
    assert bench.median_microseconds(call, 0.0) > 0


def test_table() -> None:
    """A line per case; the ratio where upstream was measured."""
    ours = {"microseconds": 2.0, "bytes_read": 4000}
    lines = bench.table({"a": ours, "b": ours | {"upstream_microseconds": 5.0}}).splitlines()
    assert lines[1].split() == ["a", "2.0", "2.0"]
    assert lines[2].split() == ["b", "2.0", "2.0", "5.0", "2.50x"]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    assert "bf16_m1" in capsys.readouterr().out.split()
    with pytest.raises(SystemExit) as ended:
        bench.main(["no_such_case"])
    assert ended.value.code == 2
    assert "no_such_case" in capsys.readouterr().err
