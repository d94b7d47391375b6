"""The benchmarks: the search of the ablation, and a run of the GPU benchmark on simulated devices."""

import json
import subprocess
import sys

import ablation
import pytest
from support.paths import BENCHMARKS, importing


@pytest.mark.parametrize(("budget", "want"), [(9, 0), (30, 10), (100, 36), (2000, 290)])
def test_the_ablation_finds_the_largest_model_that_fits(budget, want):
    """With a peak that grows faster than linearly, and after measuring only a few models."""
    measured = {}
    peak = lambda layers: measured.setdefault(layers, 5 + 2 * layers + layers**2 / 60)
    assert ablation.largest(peak, budget) == want
    assert len(measured) < 12
    if want:
        assert peak(want) <= budget < peak(want + 2)


def test_the_gpu_benchmark_reports_on_simulated_devices(tmp_path):
    shapes = ["--layers", "1", "--width", "16", "--heads", "2", "--seq", "8", "--rows", "1", "--vocab", "16"]
    runs = ["--simulate", "2", "--steps", "1", "--rounds", "1", "--forms", "plain", "full"]
    report = tmp_path / "report.json"
    command = [sys.executable, BENCHMARKS / "gpu.py", *shapes, *runs, "--json", report]
    shown = subprocess.run(command, env=importing(BENCHMARKS), check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "Peaks are not measured" in shown
    result = json.loads(report.read_text())
    assert result["ratio"] > 0 and result["measured_flops"] > 0 and result["mfu"] is None
    assert result["device"]["count"] == 2 and result["shapes"]["layers"] == 1
    assert result["max_loss_difference"] < 0.05
    assert result["forms"].keys() == {"plain", "full"}
    for form in result["forms"].values():
        assert form["error"] is None and form["peak_bytes"] is None and form["compiled_peak_bytes"] > 0
        assert form["step_s"] > 0 and form["compile_s"] > 0
