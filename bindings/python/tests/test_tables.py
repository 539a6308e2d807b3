"""Tests tables that are read in place: Parquet and Arrow files, patterns, and datasets on a hub."""

import http.server
import itertools
import json
import os
import shutil
import threading
import unittest
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import unquote, urlsplit

import dflop
import numpy
import pyarrow
from pyarrow import feather, parquet
from support import InFolder
from test_data_in import table

COMMITS = {"main": "a" * 40, "refs%2Fconvert%2Fparquet": "b" * 40}


def contents(source: Any, **settings: Any) -> list[tuple[str, dict[str, bytes]]]:
    """Returns key and fields of every sample, read from start to end."""
    loader = dflop.Loader(
        source, batch_size=16, read=dflop.Read(decode="raw"), array_type="numpy", **settings
    )
    samples = [sample for batch in loader for sample in batch.samples]
    return [(s.key, {name: numpy.asarray(s[name]).tobytes() for name in s}) for s in samples]


class Tables(InFolder):
    def test_every_format_and_codec_has_the_same_samples(self) -> None:
        rows = table(50)
        expected = contents(dflop.from_parquet(self.written(rows, "a.parquet"), self.directory / "packed"))
        self.assertEqual(len(expected), 50)
        paths = [
            self.directory / f"{codec}.parquet"
            for codec in ("none", "snappy", "zstd", "gzip", "brotli", "lz4")
        ]
        for path in paths:
            parquet.write_table(rows, path, compression=path.stem, row_group_size=7)
        for name, compression in (("f", "uncompressed"), ("z", "zstd"), ("l", "lz4")):
            paths.append(self.directory / f"{name}.feather")
            feather.write_feather(rows, paths[-1], compression=compression, chunksize=7)
        paths.append(self.directory / "stream.arrow")
        with pyarrow.ipc.new_stream(paths[-1], rows.schema) as writer:
            writer.write_table(rows, max_chunksize=7)
        for path in paths:
            with self.subTest(path.name):
                without_name = [(key, self.document(fields)) for key, fields in contents(path)]
                self.assertEqual(without_name, [(key, self.document(fields)) for key, fields in expected])
                self.assertEqual(len(dflop.Dataset(path)), 50)

    def document(self, fields: dict[str, bytes]) -> dict[str, Any]:
        """Returns fields with the document as an object, without the name of the file."""
        document = json.loads(fields["json"])
        del document["__source__"]["file"]
        return {**fields, "json": document}

    def written(self, rows: pyarrow.Table, name: str, **settings: Any) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(rows, path, row_group_size=8, **settings)
        return path

    def test_a_global_order_resumes_on_other_ranks(self) -> None:
        path = self.written(table(64), "a.parquet")
        settings: dict[str, Any] = {
            "order": dflop.Order(),
            "seed": 3,
            "batch_size": 4,
            "read": dflop.Read(decode="raw"),
        }

        def keys(loader: dflop.Loader, batches: int | None = None) -> list[str]:
            found: list[str] = []
            for number, batch in enumerate(loader):
                found += batch.sample_keys
                if number + 1 == batches:
                    break
            return found

        whole = [keys(dflop.Loader(path, dp_rank=rank, dp_size=2, **settings)) for rank in (0, 1)]
        self.assertEqual(Counter(itertools.chain(*whole)), Counter(f"row-{row}" for row in range(64)))
        begun = [dflop.Loader(path, dp_rank=rank, dp_size=2, **settings) for rank in (0, 1)]
        before = [keys(loader, 3) for loader in begun]
        state = begun[0].state_dict()
        rest = []
        for rank in range(4):
            loader = dflop.Loader(path, dp_rank=rank, dp_size=4, **settings)
            loader.load_state_dict(state)
            rest += keys(loader)
        self.assertEqual(
            sorted([*itertools.chain(*before), *rest]), sorted(f"row-{row}" for row in range(64))
        )

    def test_patterns_name_files_and_splits_are_kept_apart(self) -> None:
        for name in ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"):
            self.written(table(5), f"{name}.parquet")
        self.assertEqual(len(dflop.Dataset(self.directory / "data" / "train-*.parquet")), 10)
        self.assertEqual(len(dflop.Dataset(f"{self.directory}/**/te?t-*.parquet")), 5)
        with mock.patch.dict(os.environ, {"HOME": str(self.directory)}):
            self.assertEqual(len(dflop.Dataset("~/data/train-{00000..00001}-of-00002.parquet")), 10)
        with self.assertRaisesRegex(dflop.Error, "splits `test` and `train`"):
            dflop.Dataset(self.directory / "data")
        with self.assertRaisesRegex(dflop.Error, "no file matches"):
            dflop.Dataset(f"{self.directory}/data/none-*.parquet")

    def test_tables_and_shards_are_mixed_by_weight(self) -> None:
        path = self.written(table(40), "a.parquet")
        packed = dflop.from_parquet(path, self.directory / "packed")
        mixture = dflop.mix([(path, 3), (packed, 1)], stop="all_exhausted")
        loader = dflop.Loader(
            mixture, order=dflop.Order(), batch_size=8, read=dflop.Read(decode="raw"), seed=1
        )
        suffixes = [Path(sample.shard).suffix for batch in loader for sample in batch.samples]
        self.assertEqual(Counter(suffixes[:16]), {".parquet": 12, ".tar": 4})
        self.assertEqual(Counter(suffixes), {".parquet": 40, ".tar": 40})

    def test_a_bad_row_is_skipped_with_group_row_and_column(self) -> None:
        rows = table(20).to_pylist()
        rows[9]["image"] = {"bytes": None, "path": "elsewhere.jpg"}
        path = self.written(pyarrow.Table.from_pylist(rows), "a.parquet")
        loader = dflop.Loader(path, batch_size=8, read=dflop.Read(decode="raw", error_budget=0.5))
        self.assertEqual(sum(len(batch.samples) for batch in loader), 19)
        (bad,) = loader.skipped
        self.assertRegex(
            bad["reason"], "^row 9 of row group 1: column `image`: it names the file `elsewhere.jpg`"
        )
        self.assertEqual((bad["offset"], Path(bad["shard"]).name), (9, "a.parquet"))


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one dataset per commit, whose listings have two files per page."""

    root: ClassVar[Path]
    requests: ClassVar[list[tuple[str, str | None, str | None]]]

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def do_HEAD(self) -> None:
        self.answer(is_head=True)

    def do_GET(self) -> None:
        self.answer(is_head=False)

    def answer(self, is_head: bool) -> None:
        path, token = urlsplit(self.path).path, self.headers["Authorization"]
        self.requests.append((path, token, self.headers["Range"]))
        if token != "Bearer secret":
            return self.send(401, b'{"error": "log in"}', is_head)
        parts = path.strip("/").split("/")
        if parts[:5] == ["api", "datasets", "o", "n", "revision"]:
            commit = COMMITS.get(parts[5])
            body = json.dumps({"sha": commit}).encode()
            return self.send(200 if commit else 404, body, is_head)
        if parts[:5] == ["api", "datasets", "o", "n", "tree"]:
            return self.listing(self.root / parts[5], unquote("/".join(parts[6:])))
        if parts[:4] == ["datasets", "o", "n", "resolve"]:
            file = self.root / parts[4] / unquote("/".join(parts[5:]))
            return (
                self.send(200, file.read_bytes(), is_head) if file.is_file() else self.send(404, b"", is_head)
            )
        return self.send(404, b"", is_head)

    def listing(self, commit: Path, below: str) -> None:
        query = urlsplit(self.path).query
        start = int(query.partition("cursor=")[2] or 0)
        files = (commit / below).rglob("*") if "recursive=true" in query else (commit / below).iterdir()
        found = sorted(str(file.relative_to(commit)) for file in files if file.is_file())
        page = [{"type": "file", "path": name, "size": 1} for name in found[start : start + 2]]
        link = f'<{urlsplit(self.path).path}?{query.split("&")[0]}&cursor={start + 2}>; rel="next"'
        has_more = start + 2 < len(found)
        self.send(200, json.dumps(page).encode(), False, {"Link": link} if has_more else {})

    def send(self, status: int, body: bytes, is_head: bool, headers: dict[str, str] | None = None) -> None:
        total, span = len(body), self.headers["Range"]
        if status == 200 and span:
            first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)


class OnAHub(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.local = {}
        for commit in COMMITS.values():
            for number in range(3):
                path = self.directory / commit / "data dir" / f"train-0000{number}-of-00003.parquet"
                path.parent.mkdir(parents=True, exist_ok=True)
                parquet.write_table(table(30), path, row_group_size=6)
                self.local[commit, number] = path
            (path.parent / "deep").mkdir()
            shutil.copy(path, path.parent / "deep" / "extra.parquet")
        Hub.root, Hub.requests = self.directory, []
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}/", "HF_TOKEN": "secret"}
        patched = mock.patch.dict(os.environ, environment)
        patched.start()
        self.addCleanup(patched.stop)

    def dataset(self, name: str) -> dflop.Dataset:
        return dflop.Dataset(name, index=self.directory / "index")

    def test_a_revision_is_pinned_and_rows_are_read_by_range(self) -> None:
        names = "hf://datasets/o/n@refs%2Fconvert%2Fparquet/data dir/train-{00000..00001}-of-00003.parquet"
        dataset = self.dataset(names)
        commit = COMMITS["refs%2Fconvert%2Fparquet"]
        self.assertEqual(
            dataset.shards[0], f"hf://datasets/o/n@{commit}/data dir/train-00000-of-00003.parquet"
        )
        self.assertEqual(len(dataset), 60)
        expected = [sample for number in range(2) for sample in contents(self.local[commit, number])]
        self.assertEqual(contents(dataset), expected)
        paths = [path for path, *_ in Hub.requests]
        self.assertEqual(paths.count("/api/datasets/o/n/revision/refs%2Fconvert%2Fparquet"), 1)
        files = [(path, span) for path, _, span in Hub.requests if "/resolve/" in path]
        self.assertTrue(all(f"/resolve/{commit}/data%20dir/" in path for path, _ in files), files)
        self.assertTrue(any(span for _, span in files))
        self.assertNotIn("secret", repr(dataset) + str(dataset.shards))

    def test_the_commit_is_part_of_the_fingerprint(self) -> None:
        prints = {
            self.dataset(f"hf://datasets/o/n@{commit}/data dir/train-00000-of-00003.parquet").fingerprint
            for commit in COMMITS.values()
        }
        self.assertEqual(len(prints), 2)

    def test_directories_and_patterns_are_listed_page_by_page(self) -> None:
        self.assertEqual(len(self.dataset("hf://datasets/o/n/data dir/").shards), 3)
        self.assertEqual(len(self.dataset("hf://datasets/o/n/data dir/train-*.parquet").shards), 3)
        self.assertEqual(len(self.dataset("hf://datasets/o/n/**/*.parquet").shards), 4)
        with self.assertRaisesRegex(dflop.Error, "no file of the dataset matches"):
            self.dataset("hf://datasets/o/n/none-*.parquet")

    def test_a_token_is_read_from_the_file_that_logging_in_writes(self) -> None:
        (self.directory / "token").write_text("secret\n")
        environment = {"HF_TOKEN": "", "HF_HOME": str(self.directory)}
        with mock.patch.dict(os.environ, environment):
            self.assertEqual(len(self.dataset("hf://datasets/o/n/data dir/").shards), 3)

    def test_a_token_that_is_refused_is_named(self) -> None:
        with (
            mock.patch.dict(os.environ, {"HF_TOKEN": "wrong"}),
            self.assertRaisesRegex(dflop.Error, "HF_TOKEN"),
        ):
            self.dataset("hf://datasets/o/n@other/data dir/")

    def test_names_that_are_none_are_explained(self) -> None:
        for name in ("hf://o/n/a.parquet", "hf://datasets/o", "hf://datasets/o/n@/a.parquet"):
            with self.subTest(name), self.assertRaisesRegex(dflop.Error, "hf://datasets/OWNER/NAME/PATH"):
                dflop.Dataset(name)
        with (
            mock.patch.dict(os.environ, {"HF_ENDPOINT": "no address"}),
            self.assertRaisesRegex(dflop.Error, "HF_ENDPOINT|no address"),
        ):
            dflop.Dataset("hf://datasets/o/n/a.parquet")


if __name__ == "__main__":
    unittest.main()
