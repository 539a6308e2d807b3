"""Tests `dflop.monitor`: Prometheus text and server, scalars, progress."""

import http.client
import io
import json
import re
import socket
import tempfile
import time
import unittest
from pathlib import Path
from typing import ClassVar

import dflop
from dflop import monitor
from support import WithExample

DASHBOARD = Path(__file__).parents[3] / "docs/grafana.json"
SAMPLE_LINE = re.compile(r'^(dflop_[a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (\S+)$')


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Board:
    """A `SummaryWriter`."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int | None]] = []

    def add_scalar(self, name: str, value: float, step: int | None) -> None:
        self.scalars.append((name, value, step))


class Run:
    """A run of Weights & Biases."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int | None]] = []

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((values, step))


class Bar:
    """A bar of tqdm."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, total: int | None, initial: int, unit: str) -> None:
        self.total, self.initial, self.unit, self.done, self.postfixes = total, initial, unit, 0, []
        self.mininterval, self.is_closed = 0.0, False
        Bar.made.append(self)

    def update(self, count: int) -> None:
        self.done += count

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfixes.append(text)

    def close(self) -> None:
        self.is_closed = True


def parsed(text: str) -> dict[str, dict[str, float]]:
    """Parses the text format; every metric has help and type before its values, which are different."""
    metrics: dict[str, dict[str, float]] = {}
    name = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in metrics, line
            metrics[name] = {}
        elif line.startswith("# TYPE "):
            kind = line.split()[3]
            assert line.split()[2] == name and kind in {"counter", "gauge"}, line
            assert name.endswith("_total") == (kind == "counter"), line
        else:
            match = SAMPLE_LINE.match(line)
            assert match is not None and match[1] == name and match[2] not in metrics[name], line
            metrics[name][match[2]] = float(match[3])
    return metrics


class Monitor(WithExample):
    def loader(self, **settings: object) -> dflop.BalancedLoader:
        settings = {"model": self.model, "global_batch_size": 16, "microbatches": 2, "epochs": 1} | settings
        return dflop.BalancedLoader(self.shards, **settings)

    def run_through(self, loader: dflop.BalancedLoader) -> int:
        return sum(len(mb.samples) for step in loader for mb in step.microbatches)

    def test_the_text_has_all_metrics_of_the_loader(self) -> None:
        loader = self.loader(dp_rank=1, dp_size=2)
        samples = self.run_through(loader)
        metrics = parsed(monitor.text(loader))
        rank = 'rank="1"'
        self.assertEqual(metrics["dflop_stage_items_total"][f'{rank},stage="deliver"'], samples)
        self.assertEqual(metrics["dflop_source_samples_total"], {f'{rank},source="shards"': samples})
        tokens = loader.prepare_report()["tokens"]
        self.assertEqual(metrics["dflop_source_tokens_total"], {f'{rank},source="shards"': tokens})
        self.assertEqual(metrics["dflop_prepared_tokens_total"], {rank: tokens})
        self.assertEqual(metrics["dflop_step"], {rank: 6})
        self.assertLessEqual(sum(metrics["dflop_bottleneck"].values()), 1)
        snapshot = loader.metrics()
        for field in ("retries", "stalls"):
            name = "dflop_request_retries_total" if field == "retries" else f"dflop_{field}_total"
            self.assertEqual(metrics[name], {rank: snapshot[field]})

    def test_the_plain_loader_has_metrics_too(self) -> None:
        loader = dflop.Loader(self.shards)
        samples = sum(len(batch.samples) for batch in loader)
        metrics = parsed(monitor.text(loader))
        self.assertEqual(metrics["dflop_stage_items_total"]['rank="0",stage="deliver"'], samples)
        self.assertNotIn("dflop_source_samples_total", metrics)

    def test_labels_are_escaped_and_checked(self) -> None:
        loader = self.loader()
        text = monitor.text(loader, labels={"job": 'a "b"\\\nc'})
        parsed(text)
        self.assertIn(r'job="a \"b\"\\\nc"', text)
        for name in ("rank", "stage", "__name", "no-dash", ""):
            with self.assertRaisesRegex(ValueError, "labels"):
                monitor.text(loader, labels={name: "x"})

    def test_times_of_modules_are_those_of_the_timer(self) -> None:
        class Timer:
            module_seconds: ClassVar = {"vision": 1.5, "llm": float("nan")}

        text = monitor.text(self.loader(), timer=Timer())
        self.assertIn('dflop_module_seconds_total{rank="0",module="vision"} 1.5\n', text)
        self.assertIn('dflop_module_seconds_total{rank="0",module="llm"} NaN\n', text)

    @unittest.skipUnless(DASHBOARD.is_file(), "runs in a checkout")
    def test_the_dashboard_asks_for_metrics_and_labels_that_there_are(self) -> None:
        class Timer:
            module_seconds: ClassVar = {"llm": 1.5}

        with tempfile.TemporaryDirectory() as directory:
            processor = dflop.Processor(long_sample="truncate:256")
            record = monitor.Record(self.loader(processor=processor), Path(directory, "steps.jsonl"))
            for step in record:
                record.log(loss=float(step.step), learning_rate=1e-4)
                self.trained(step)
            metrics = parsed(monitor.text(record, timer=Timer()))
        names = {re.search('name="([a-z_]+)"', labels)[1] for labels in metrics["dflop_recorded"]}
        self.assertLessEqual({"loss", "learning_rate", "seconds"}, names)
        dashboard = json.loads(DASHBOARD.read_text())
        asked = set()
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                with self.subTest(panel["title"], expr=target["expr"]):
                    expr, legend = target["expr"], target["legendFormat"]
                    self.assertEqual(expr.count("("), expr.count(")"))
                    selected = re.findall(r"(dflop_\w+)\{([^}]*)\}", expr)
                    self.assertEqual(len(selected), expr.count("dflop_"), "each metric has its labels")
                    for metric, labels in selected:
                        values = metrics[metric]
                        wanted = re.findall(r'(\w+)(=~?)"([^"]*)"', labels)
                        self.assertIn(("rank", "=~", "$rank"), wanted)
                        grouped = re.findall(r"by \((\w+)\)", expr)
                        for name in [*grouped, *re.findall(r"{{(\w+)}}", legend)]:
                            self.assertTrue(all(f'{name}="' in found for found in values), name)
                        exact = [f'{name}="{value}"' for name, sign, value in wanted if sign == "="]
                        self.assertTrue(any(all(one in found for one in exact) for found in values), exact)
                        # Rates are of counters, and values of gauges.
                        if not expr.startswith("sum(dflop_skipped"):
                            is_rate = f"rate({metric}{{" in expr or f"increase({metric}{{" in expr
                            self.assertEqual(is_rate, metric.endswith("_total"))
                        asked.add(metric)
        (rank,) = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["name"] == "rank"]
        self.assertIn(re.search(r"dflop_\w+", rank)[0], metrics)
        self.assertGreater(len(asked), 12)
        places = [panel["gridPos"] for panel in dashboard["panels"]]
        cells = [
            (column, row)
            for place in places
            for column in range(place["x"], place["x"] + place["w"])
            for row in range(place["y"], place["y"] + place["h"])
        ]
        self.assertEqual(len(cells), len(set(cells)), "panels lie beside each other")
        self.assertLess(max(column for column, _ in cells), 24)

    def test_only_loaders_are_monitored(self) -> None:
        for call in (monitor.text, monitor.serve, monitor.scalars, monitor.Progress):
            with self.assertRaisesRegex(
                TypeError, "expected a dflop.Loader or dflop.BalancedLoader, found list"
            ):
                call([])

    def ask(self, port: int, method: str = "GET", path: str = "/metrics", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.putrequest(method, path, skip_host=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def test_the_server_answers_prometheus_on_this_machine_only(self) -> None:
        loader = self.loader()
        with monitor.serve(loader) as server:
            self.assertEqual(server.url, f"http://127.0.0.1:{server.port}/metrics")
            for host in (f"127.0.0.1:{server.port}", "localhost", f"LOCALHOST:{server.port}"):
                status, page = self.ask(server.port, Host=host)
                self.assertEqual(status, 200)
                self.assertIn("dflop_step", parsed(page))
            for host in (
                "evil.example",
                f"evil.example:{server.port}",
                "127.0.0.1:1",
                "127.0.0.1.evil.example",
            ):
                self.assertEqual(self.ask(server.port, Host=host)[0], 403, host)
            self.assertEqual(self.ask(server.port)[0], 403)
            for path in ("/", "/metrics/", "/metrics?x=1", "/../metrics"):
                self.assertEqual(self.ask(server.port, path=path, Host="localhost")[0], 404, path)
            for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
                self.assertEqual(self.ask(server.port, method=method, Host="localhost")[0], 405, method)
            with self.assertRaises(OSError):
                monitor.serve(loader, server.port)
            self.assertEqual(server._server.server_address[0], "127.0.0.1")
        with self.assertRaises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
        server.close()

    def test_a_closed_loader_is_a_failed_scrape(self) -> None:
        loader = self.loader()
        with monitor.serve(loader) as server:
            loader.close()
            status, page = self.ask(server.port, Host="localhost")
        self.assertEqual(status, 503)
        self.assertIn("closed", page)

    def test_a_silent_client_does_not_keep_the_server(self) -> None:
        with monitor.serve(self.loader()) as server:
            socket.create_connection(("127.0.0.1", server.port)).close()
            self.assertEqual(self.ask(server.port, Host="localhost")[0], 200)

    def test_slow_callers_do_not_keep_a_scrape_waiting(self) -> None:
        with monitor.serve(self.loader()) as server:
            callers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
            try:
                for caller in callers[20:]:
                    caller.send(b"G")
                started = time.monotonic()
                for _ in range(3):
                    self.assertEqual(self.ask(server.port, Host="localhost")[0], 200)
                self.assertLess(time.monotonic() - started, 3)
                # A byte each second holds no connection for longer than the time of a whole request.
                ended = False
                while not ended and time.monotonic() - started < 15:
                    time.sleep(1)
                    try:
                        callers[-1].send(b"E")
                        callers[-1].settimeout(0.1)
                        ended = callers[-1].recv(1) == b""
                    except TimeoutError:
                        continue
                    except OSError:
                        ended = True
                self.assertTrue(ended)
                self.assertLess(time.monotonic() - started, 8)
                self.assertEqual(len(server._server._ends), 0)
            finally:
                for caller in callers:
                    caller.close()

    def test_boards_and_runs_get_the_scalars(self) -> None:
        loader = self.loader(steps=4)
        samples = self.run_through(loader)
        board, run = Board(), Run()
        monitor.log(loader, board)
        monitor.log(loader, run, 17, prefix="")
        by_name = {name: (value, step) for name, value, step in board.scalars}
        self.assertEqual(by_name["dflop/samples"], (samples, 3))
        self.assertEqual(by_name["dflop/source/shards/samples"], (samples, 3))
        self.assertTrue(0 <= by_name["dflop/data_wait_share"][0] <= 1)
        ((values, step),) = run.logged
        self.assertEqual((values["samples"], step), (samples, 17))
        self.assertEqual({f"dflop/{name}" for name in values}, set(by_name))
        self.assertGreater(values["tokens_per_second"], values["samples_per_second"])
        with self.assertRaisesRegex(TypeError, "expected a method `add_scalar` or `log`"):
            monitor.log(loader, object())

    def test_boards_and_runs_get_what_a_record_logs(self) -> None:
        board, run = Board(), Run()
        with tempfile.TemporaryDirectory() as directory:
            record = monitor.Record(self.loader(steps=4), Path(directory, "steps.jsonl"))
            for step in record:
                self.trained(step)
                record.log(loss=4.0 - step.step, learning_rate=1e-4)
                monitor.log(record, board)
                monitor.log(record, run)
        losses = [(value, step) for name, value, step in board.scalars if name == "dflop/loss"]
        self.assertEqual(losses, [(4.0, 0), (3.0, 1), (2.0, 2), (1.0, 3)])
        self.assertEqual([values["dflop/loss"] for values, _ in run.logged], [4.0, 3.0, 2.0, 1.0])
        self.assertEqual([step for _, step in run.logged], [0, 1, 2, 3])
        self.assertEqual({values["dflop/learning_rate"] for values, _ in run.logged}, {1e-4})
        # The first step has not ended when it is logged.
        self.assertEqual(
            ["dflop/step_seconds" in values for values, _ in run.logged], [False, True, True, True]
        )
        for measured in ("dflop/time", "dflop/seconds", "dflop/step"):
            self.assertNotIn(measured, run.logged[-1][0])

    def test_progress_is_a_line_on_a_terminal(self) -> None:
        loader, terminal = self.loader(), Terminal()
        progress = monitor.Progress(loader, interval_seconds=0, file=terminal)
        self.assertEqual(len(progress), 6)
        self.assertEqual([step.step for step in progress if self.trained(step)], list(range(6)))
        lines = terminal.getvalue().split("\r")
        self.assertEqual(lines[0], "")
        self.assertTrue(lines[-1].endswith("\n") and "\n" not in "".join(lines[:-1]))
        rates = r"\S+( [kM])? samples/s   \S+( [kM])? tokens/s"
        pattern = rf"step 6 of 6   {rates}   0:00:00 left   wait \S+ %   (data|compute)"
        self.assertRegex(lines[-1].strip(), f"^{pattern}$")

    def trained(self, step: dflop.Step) -> bool:
        return bool(list(step.microbatches))

    def test_progress_is_silent_elsewhere_unless_asked_for(self) -> None:
        silent, file = io.StringIO(), io.StringIO()
        self.assertEqual(len(list(monitor.Progress(self.loader(), interval_seconds=0, file=silent))), 6)
        self.assertEqual(silent.getvalue(), "")
        loader = dflop.Loader(self.shards, batch_size=16)
        self.assertEqual(len(list(monitor.Progress(loader, always=True, interval_seconds=0, file=file))), 6)
        self.assertEqual(len(file.getvalue().splitlines()), 6)
        self.assertIn("batch 6 of 6   ", file.getvalue())
        self.assertNotIn("tokens/s", file.getvalue())

    def test_progress_of_a_run_without_end_knows_no_time_left(self) -> None:
        file = io.StringIO()
        loader = self.loader(epochs=None, steps=3)
        for _ in monitor.Progress(loader, always=True, interval_seconds=0, file=file):
            pass
        self.assertRegex(file.getvalue().splitlines()[-1], "^step 3 ")

    def test_progress_draws_on_a_bar(self) -> None:
        loader = self.loader()
        next(iter(loader))
        list(monitor.Progress(loader, tqdm=Bar))
        bar = Bar.made.pop()
        self.assertEqual((bar.total, bar.initial, bar.done, bar.unit, bar.is_closed), (6, 1, 5, "step", True))
        self.assertRegex(bar.postfixes[-1], "samples/s, .*tokens/s, wait .*, (data|compute)$")

    def test_the_line_is_ended_by_an_error_of_the_loop(self) -> None:
        terminal = Terminal()
        with self.assertRaises(ZeroDivisionError):
            for step in monitor.Progress(self.loader(), interval_seconds=0, file=terminal):
                if step.step == 2:
                    raise ZeroDivisionError
        self.assertTrue(terminal.getvalue().endswith("\n"))
        with self.assertRaisesRegex(ValueError, "interval_seconds"):
            monitor.Progress(self.loader(), interval_seconds=float("nan"))


if __name__ == "__main__":
    unittest.main()
