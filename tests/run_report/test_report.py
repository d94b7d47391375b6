"""The page about a run is complete, safe and always the same, whatever is in its directory."""

import datetime
import html.parser
import json
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from click.testing import CliRunner

import zerojax
from zerojax.cli import main
from zerojax.run_report.charts import chart, is_logarithmic, thinned
from zerojax.run_report.page import write_report
from zerojax.utils.masking import MASK

START = {"time": "2026-11-24T10:00:00+00:00", "from_step": 0, "num_steps": 100, "host": "node-1", "processes": 1,
         "devices": "8 x cpu", "mesh": {"data": 8}, "stage": 3, "config": {"lr": 0.1}, "command": "python train.py",
         "versions": {"jax": "0.10.2"}, "dtypes": {"param_dtype": "float32"}}  # fmt: skip


def rows(*values, **more):
    return [{"step": k, "time": 1.76e9 + k, "loss": value} | more for k, value in enumerate(values, 1)]


def as_lines(objects):
    return "".join(json.dumps(each) + "\n" for each in objects)


def run(folder, metrics=(), starts=(START,), config=None, plan=None):
    folder.mkdir(exist_ok=True)
    text = metrics if isinstance(metrics, str) else as_lines(metrics)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "starts.jsonl").write_text(as_lines(starts))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if plan is not None:
        (folder / "plan.txt").write_text(plan)
    return folder


class Page(html.parser.HTMLParser):
    """The texts of a page, its elements, and the titles of its charts."""

    def __init__(self, path):
        super().__init__()
        self.source, self.tags, self.texts, self.titles, self.attributes = path.read_text(), [], [], [], []
        self._open = []
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._open.append(tag)
        self.attributes += [name for name, _ in attributes]

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.texts.append(data)
        if self._open[-1:] == ["figcaption"]:
            self.titles.append(data.strip())

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def page(folder):
    return Page(write_report(folder))


def test_a_run_of_fit_that_was_continued(tmp_path):
    """Training, evaluation, another learning rate at the second start, and the plan."""
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    step = zero.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    evaluate = lambda state: {"loss": jnp.mean(state.params["w"] ** 2), "only": 1.5}
    for rate, num_steps in ((0.1, 4), (0.05, 6)):
        state = zero.init(lambda key: {"w": jax.random.normal(key, (16, 16))}, optax.sgd(rate))
        zerojax.fit(
            zero, state, step, lambda i: jnp.full((8, 16), 1.0 + i), num_steps, tmp_path / "run", evaluate=evaluate,
            log_every=1, config={"lr": rate, "api_key": "hunter2"}, tokens_per_row=4,
        )  # fmt: skip
    found = page(tmp_path / "run")
    assert "Step 6 of 6" in found.text and "8 x cpu" in found.text
    assert found.titles[:3] == ["Loss", "Gradient norm", "Tokens per second"] and "eval/only" in found.titles
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    assert f"last loss {last['loss']:,.5g}" in found.text
    assert "lr 0.1 0.05" in found.text  # what changed at the second start
    assert "By formula" in found.text and "parameters" in found.text
    assert "hunter2" not in found.source and MASK in found.text
    assert "Dotted lines" in found.text and found.tags.count("svg") == len(found.titles)


def test_the_page_is_the_same_for_the_same_files(tmp_path):
    folder = run(tmp_path / "run", rows(3.0, 2.0, "NaN"), [START, START | {"from_step": 2}], {"a": 1}, "plan")
    first = write_report(folder, tmp_path / "a.html").read_bytes()
    assert write_report(folder, tmp_path / "b.html").read_bytes() == first


def test_the_page_is_one_file_that_runs_and_loads_nothing(tmp_path):
    found = page(run(tmp_path / "run", rows(3.0, 2.0), plan="x", config={"a": "https://example.com/x.js"}))
    assert not {"script", "img", "iframe", "object", "embed", "link", "form", "base", "image"} & set(found.tags)
    assert not {"src", "href", "srcset"} & set(found.attributes)
    assert not [name for name in found.attributes if name.startswith("on")]
    assert "url(http" not in found.source and "@import" not in found.source
    assert "default-src 'none'" in found.source


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;$\\frac{1}$ \u202e\x00\ud800"


def test_hostile_names_and_values_are_text(tmp_path):
    start = dict.fromkeys(START, HOSTILE) | {"config": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    metrics = [row | {HOSTILE: 1.0, f"eval/{HOSTILE}": 2.0, "_under": 3.0, "$x$": 4.0} for row in rows(1.0, 2.0)]
    folder = tmp_path / "run <b>"
    found = page(
        run(folder, metrics, [start, start | {"config": {HOSTILE: 1}}], {HOSTILE: [HOSTILE]}, HOSTILE.strip("\ud800"))
    )
    assert not {"script", "img"} & set(found.tags) and "onerror" not in found.attributes and "b" not in found.tags
    assert found.text.count("<script>alert(1)</script>") >= 8 and "run <b>" in found.text
    assert {"_under", "$x$"} <= set(found.titles)


def test_secrets_of_a_directory_from_elsewhere_are_masked(tmp_path):
    token = "hf_" + "a1B2" * 8
    start = START | {"command": f"python train.py --api-key hunter2 --hub {token}", "config": {"password": "hunter3"}}
    later = start | {"config": {"password": "hunter4", "lr": 1}}
    found = page(run(tmp_path / "run", rows(1.0), [start, later], {"db": {"secret": "hunter5"}, "hub": token}))
    assert "hunter" not in found.source and token not in found.source and found.source.count(MASK) >= 4


def test_a_row_that_is_being_written_is_counted(tmp_path):
    found = page(run(tmp_path / "run", as_lines(rows(3.0, 2.0)) + '{"step": 3, "lo'))
    assert "Step 2 of 100" in found.text and "1 line could not be read" in found.text
    assert "last loss 2 " in found.text


ODD_ROWS = ["null", "[]", "3", '"x"', "{}", '{"step": "1"}', '{"step": true}', '{"step": -1}', '{"step": 1e400}',
            '{"step": 1' + "0" * 400 + "}", "[" * 5000, '{"step": 1, "loss": [1]}', '{"step": 1, "loss": "abc"}',
            '{"step": 1, "loss": 1' + "0" * 400 + "}", '{"step": 1, "time": "x", "loss": null}',
            "\xff\x00"]  # fmt: skip


@pytest.mark.parametrize("line", ODD_ROWS, ids=range(len(ODD_ROWS)))
def test_an_odd_line_is_not_an_error(line, tmp_path):
    """Next to rows, and as the only line; as a row, and as a start."""
    first = page(run(tmp_path / "run", f"{line}\n{as_lines(rows(3.0))}{line}"))
    assert "last loss" in first.text
    folder = run(tmp_path / "other", line)
    (folder / "starts.jsonl").write_text(f"{line}\n")
    (folder / "config.json").write_text(line)
    assert page(folder).text


@pytest.mark.parametrize("values", [["NaN"], ["NaN"] * 5, ["Infinity", 1.0], ["-Infinity", "NaN", 2.0, 1e308, -1e308]])
def test_a_loss_that_is_not_finite_is_marked(values, tmp_path):
    found = page(run(tmp_path / "run", rows(*values)))
    bad = sum(not abs(float(value)) < 1e100 for value in values)
    assert f"({bad} values not finite)" in found.text and "not finite" in found.text
    assert found.tags.count("svg") == 1


def test_a_run_without_rows_or_starts(tmp_path):
    assert "No metrics yet" in page(run(tmp_path / "run")).text
    only_rows = page(run(tmp_path / "rows", rows(1.0), []))
    assert "Step 1" in only_rows.text and only_rows.tags.count("svg") == 1
    (tmp_path / "starts").mkdir()
    (tmp_path / "starts" / "starts.jsonl").write_text(as_lines([START]))
    assert "node-1" in page(tmp_path / "starts").text


def test_starts_with_odd_values(tmp_path):
    starts = [START, {"from_step": 10**400}, {"from_step": "3", "config": []}, {"config": {"lr": {"a": [1]}}}, {}]
    found = page(run(tmp_path / "run", rows(2.0, 1.0), starts))
    assert "starts 5" in found.text


def test_curves_are_thinned_and_keep_their_extremes(tmp_path):
    curve = [(k, 1.0 + 1e-3 * math.sin(k)) for k in range(100_000)]
    curve[54_321] = (54_321, 99.0)
    curve[65_432] = (65_432, -99.0)
    few = thinned(curve)
    assert len(few) <= 602 and few == sorted(few) and {(54_321, 99.0), (65_432, -99.0)} <= set(few)
    assert few[0] == curve[0] and few[-1] == curve[-1] and set(few) <= set(curve)
    assert thinned(curve[:600]) == curve[:600]


def test_megabytes_of_metrics_are_a_small_page(tmp_path):
    many = [{"step": k, "time": 1.76e9 + k, "loss": 1 / k, "grad_norm": k % 7 + 0.5} for k in range(1, 60_001)]
    folder = run(tmp_path / "run", many)
    assert (folder / "metrics.jsonl").stat().st_size > 4e6
    assert write_report(folder).stat().st_size < 200e3


def test_many_metrics_have_a_bound_and_are_counted(tmp_path):
    found = page(run(tmp_path / "run", rows(1.0, **{f"m{k:03d}": 1.0 for k in range(100)})))
    assert found.tags.count("svg") == 40 and "61 more metrics" in found.text


def test_a_spike_has_a_logarithmic_scale():
    flat = [(k, 1.0) for k in range(10)]
    assert not is_logarithmic([flat]) and is_logarithmic([[*flat, (10, 60.0)]])
    assert not is_logarithmic([[*flat, (10, 60.0), (11, -1.0)]])  # which has no logarithm
    svg = chart({"training": [*flat, (10, 1000.0)]})
    assert "mathdefault" not in svg and "1,000" in svg


def test_a_restart_is_a_line_at_its_step():
    plain, marked = chart({"training": [(1, 1.0), (9, 2.0)]}), chart({"training": [(1, 1.0), (9, 2.0)]}, [5])
    dotted = lambda svg: len(re.findall("stroke-dasharray", svg))
    assert dotted(marked) == dotted(plain) + 1


def test_measured_memory_is_beside_the_plan(tmp_path):
    memory = [row | {"peak_bytes": 2**30 * k} for k, row in enumerate(rows(1.0, 1.0), 1)]
    found = page(run(tmp_path / "run", memory, plan="sum 1.9 GiB"))
    assert "peak_bytes 2 GiB" in found.text and "sum 1.9 GiB" in found.text
    assert "recorded no measured memory" in page(run(tmp_path / "none", rows(1.0), plan="sum")).text


def test_times_are_those_of_the_rows(tmp_path):
    found = page(run(tmp_path / "run", rows(1.0, 1.0, 1.0)))
    last = datetime.datetime.fromtimestamp(1.76e9 + 3, datetime.UTC)
    assert last.strftime("%Y-%m-%d %H:%M UTC") in found.text and "0:00:02" in found.text


def command(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_command_writes_the_page(tmp_path):
    folder = run(tmp_path / "run", rows(1.0))
    shown = command(folder)
    assert shown.exit_code == 0 and f"{folder / 'report.html'}: " in shown.output
    assert command(folder, "--out", tmp_path / "page.html").exit_code == 0 and (tmp_path / "page.html").exists()


def test_the_command_reports_errors_without_a_traceback(tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((tmp_path / "empty",), "is not the directory of a run"),
        ((tmp_path / "nothing",), "does not exist"),
        ((run(tmp_path / "run", rows(1.0)), "--out", tmp_path / "no" / "page.html"), "the page cannot be written"),
    ):
        shown = command(*arguments)
        assert shown.exit_code in (1, 2) and message in shown.output and "Traceback" not in shown.output
        assert isinstance(shown.exception, SystemExit)
