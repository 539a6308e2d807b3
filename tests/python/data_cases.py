"""Runs recorded odd archives, images, clips and documents through the package, and says what became of each.

    make data-cases CASES=DIRECTORY                 # or, with the package installed:
    python3 tests/python/data_cases.py DIRECTORY

DIRECTORY has `cases.json`: by name, `KIND/NAME`, what other readers make of a case, and the files beside it.
KIND is `tars` (`samples`: keys with the length and SHA-256 of each field), `images` (`expected`: a PNG of what
Pillow reads, or its error under `pillow`), `audio` (frames, channels and rate of libsndfile and ffmpeg) or
`texts` (`files`, and `right`: messages, a caption, or a rule).

Every case is one of: *right*, as the reference has it, also where that is a refusal; *refused*, named with a
reason where the reference reads it; *differs*, delivered in another way for a reason in `REASONS`; *wrong*,
delivered in another way, and said so; *silent*, delivered in another way without a word; *open*, without a
reference. The exit status is 1 if a case is silent.
"""

import argparse
import base64
import collections
import contextlib
import hashlib
import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dflop
import numpy as np
from dflop import example

# Largest mean difference of decoders that are both right, out of 255: rounding, and chroma interpolation.
PIXELS_DIFFER = 6.0
EVERYTHING = dflop.Read(error_budget=1.0)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.text %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Result:
    """What became of a case."""

    verdict: str
    detail: str = ""


@dataclass
class Run:
    """What a loader delivered, and what it said."""

    delivered: Any = None
    said: list[str] = field(default_factory=list)

    def refusal(self) -> Result:
        """The result of a case that the reference reads, and that was not delivered."""
        said = "; ".join(self.said)
        return Result("refused", said) if said else Result("silent", "nothing was delivered")


@contextlib.contextmanager
def listening(run: Run) -> Any:
    """Collects warnings and errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except dflop.Error as error:
            run.said.append(str(error))
    run.said += [str(warning.message) for warning in caught]


def skipped(loader: Any) -> list[str]:
    """Reasons of the samples that a loader left out."""
    return [f"{entry['key']} {entry['field'] or ''}: {entry['reason']}" for entry in loader.skipped]


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    """Writes one sample, `k`."""
    with tarfile.open(path, "w") as tar:
        for extension, content in files.items():
            member = tarfile.TarInfo(f"k.{extension}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


class Archives:
    """Cases of archives: keys, fields and bytes."""

    def __init__(self, cases: Path, scratch: Path) -> None:
        self.cases, self.scratch = cases, scratch

    def run(self, case: dict[str, Any]) -> Result:
        """Compares the fields of all samples."""
        path = shutil.copy(self.cases / case["file"], self.scratch)
        run, found = Run(), []
        with listening(run):
            loader = dflop.Loader(path, read=dflop.Read(decode="raw", error_budget=1.0))
            for batch in loader:
                for sample in batch.samples:
                    contents = {name: bytes(np.asarray(value).tobytes()) for name, value in sample.items()}
                    found.append([sample.key, {name: self.described(data) for name, data in contents.items()}])
            run.said += skipped(loader)
        expected = [[key, dict(fields)] for key, fields in case["samples"]]
        if found == expected:
            return Result("right")
        if not expected and run.said:
            return Result("right", "refused, as by webdataset: " + "; ".join(run.said))
        missing = [sample for sample in expected if sample not in found]
        if run.said:
            is_subset = all(sample in expected for sample in found)
            return Result("refused" if is_subset and missing else "wrong", "; ".join(run.said))
        return Result("silent", f"{found} instead of {expected}")

    @staticmethod
    def described(data: bytes) -> list[Any]:
        """Length and digest of a field."""
        return [len(data), hashlib.sha256(data).hexdigest()]


class Images:
    """Cases of images: pixels as Pillow has them."""

    def __init__(self, cases: Path, scratch: Path) -> None:
        self.cases, self.scratch = cases, scratch

    def run(self, case: dict[str, Any]) -> Result:
        """Compares the pixels of the case with those of the expected PNG."""
        run, pixels = self.pixels(self.cases / case["file"])
        if "expected" not in case:
            if pixels is None:
                return Result("right", "refused, as by Pillow: " + "; ".join(run.said))
            return Result("wrong" if run.said else "open", f"read, and Pillow says {case['pillow']}")
        _, expected = self.pixels(self.cases / case["expected"])
        if pixels is None:
            return run.refusal()
        if expected is None or pixels.shape != expected.shape:
            found = f"{pixels.shape} instead of {None if expected is None else expected.shape}"
            return Result("wrong" if run.said else "silent", found)
        difference = float(np.abs(pixels.astype(int) - expected.astype(int)).mean())
        if difference <= PIXELS_DIFFER:
            return Result("right", f"mean difference {difference:.2f}")
        return Result("wrong" if run.said else "silent", f"mean difference {difference:.2f} of 255")

    def pixels(self, file: Path) -> tuple[Run, Any]:
        """Reads one image: indexed first, so that what the index refuses is not decoded."""
        extension = file.name.rsplit(".", 1)[1]
        path = write_tar(self.scratch / "image.tar", {extension: file.read_bytes()})
        return first_field(path, extension)


def first_field(path: Path, extension: str) -> tuple[Run, Any]:
    """The only field of the only sample of a shard, as an array or a clip; `None` if it was refused."""
    shutil.rmtree(path.parent / ".dflop", ignore_errors=True)
    run, value = Run(), None
    with listening(run):
        loader = dflop.Loader(path, read=EVERYTHING, dp_size=1)
        for batch in loader:
            value = batch.samples[0].get(extension)
        run.said += skipped(loader)
    is_decoded = value is not None and not isinstance(value, dflop.Array)
    return run, value if is_decoded or hasattr(value, "rate") or hasattr(value, "sample_rate") else as_pixels(value)


def as_pixels(value: Any) -> Any:
    """An image as a NumPy array; `None` for bytes that no codec decoded."""
    if value is None:
        return None
    array = np.asarray(value)
    return array if array.ndim == 3 else None


class Clips:
    """Cases of audio: frames, channels and rate as libsndfile or ffmpeg have them."""

    def __init__(self, cases: Path, scratch: Path) -> None:
        self.cases, self.scratch = cases, scratch

    def run(self, case: dict[str, Any]) -> Result:
        """Compares the shape of a clip."""
        file = self.cases / case["file"]
        extension = file.name.rsplit(".", 1)[1]
        path = write_tar(self.scratch / "clip.tar", {extension: file.read_bytes()})
        run, clip = first_field(path, extension)
        peers = [case[f"{peer}_frames_channels_rate"] for peer in ("libsndfile", "ffmpeg")]
        known = [shape for shape in peers if isinstance(shape, list)]
        if clip is None and not run.said:
            return Result("refused", "no codec decodes it: the field is delivered as stored")
        if clip is None or not hasattr(clip, "samples"):
            if not run.said and not known:
                return Result("silent", "nothing was delivered")
            is_refused_by_one = len(known) < len(peers)
            return Result("right", "refused, as by one peer: " + "; ".join(run.said)) if is_refused_by_one and run.said else run.refusal()
        samples = np.asarray(clip.samples)
        frames, channels = samples.shape
        found = [frames, channels, clip.sample_rate_hz]
        # libsndfile has Opus at its input rate: the same seconds are the same clip.
        if any(frames * shape[2] == shape[0] * clip.sample_rate_hz and channels == shape[1] for shape in known):
            return Result("right")
        if not known:
            return Result("open", f"{found}; no peer reads it")
        return Result("wrong" if run.said else "silent", f"{found} instead of {known}")


class Texts:
    """Cases of documents: the rendered prompt and the targets."""

    def __init__(self, cases: Path, scratch: Path) -> None:
        self.cases, self.scratch = cases, scratch
        self.model = scratch / "model"
        example.write_model(self.model)
        config = json.loads((self.model / "config.json").read_text())
        special = {token: number for number, token in self.special(config)}
        (self.model / "tokenizer.json").write_text(json.dumps(byte_tokenizer(special)))
        self.tokens = {number: token for token, number in special.items()}
        self.bytes = {number: byte for byte, number in byte_ids().items()}

    def special(self, config: dict[str, Any]) -> list[tuple[int, str]]:
        """Numbers of the special tokens of the example's model."""
        tokenizer = json.loads((self.model / "tokenizer.json").read_text())
        return [(token["id"], token["content"]) for token in tokenizer["added_tokens"]]

    def run(self, case: dict[str, Any]) -> Result:
        """Compares prompt and targets with what the reference renders."""
        path = write_tar(self.scratch / "text.tar", {name: content(text) for name, text in case["files"].items()})
        shutil.rmtree(self.scratch / ".dflop", ignore_errors=True)
        run = Run()
        with listening(run):
            loader = dflop.BalancedLoader(
                path, model=self.model, global_batch_size=1, epochs=1, read=EVERYTHING,
                processor=dflop.Processor(chat_template=TEMPLATE),
            )
            for step in loader:
                for microbatch in step.microbatches:
                    if microbatch.samples:
                        run.delivered = self.texts(microbatch)
            run.said += skipped(loader)
        return self.judged(case, run)

    def texts(self, microbatch: Any) -> tuple[str, str, bool]:
        """Prompt without media, targets, and whether there is an image."""
        ids, labels = (np.asarray(microbatch[name])[0] for name in ("input_ids", "labels"))
        whole, targets = self.decoded(ids), self.decoded(ids[labels != -100])
        return re.sub(r"<\|vision_start\|>.*?<\|vision_end\|>", "", whole), targets, "pixel_values" in microbatch

    def decoded(self, ids: Any) -> str:
        """Text of token numbers."""
        pieces = [self.tokens[i].encode() if i in self.tokens else bytes([self.bytes[i]]) for i in map(int, ids)]
        return b"".join(pieces).decode(errors="replace")

    def judged(self, case: dict[str, Any], run: Run) -> Result:
        """Compares with the messages, the caption or the rule of the case."""
        right = case["right"]
        if run.delivered is None:
            is_refusal = right is None or right == "" or right in ("error", "error-or-warning", "?")
            refused = run.refusal()
            return Result("right", "refused: " + refused.detail) if is_refusal and run.said else refused
        prompt, targets, has_image = run.delivered
        shown = f"prompt {prompt!r}, targets {targets!r}"
        if right == "error-or-warning":
            return Result("right", "; ".join(run.said)) if run.said else Result("silent", shown)
        if right == "?" or right is None:
            return Result("open", shown)
        if isinstance(right, str):
            return self.ruled(right, prompt, targets, has_image, run)
        expected, answers = rendered(right, case.get("tools"))
        is_right = prompt == expected and targets == answers
        if not is_right and "answers" in case["what"] or "label" in case["what"]:
            # Any of the answers of the case is right; the reference holds one for all of them.
            is_right = targets.removesuffix("<|im_end|>") in json.dumps(case["files"]) and bool(targets)
        if is_right:
            return Result("right")
        return Result("wrong" if run.said else "silent", f"{shown} instead of {expected!r}, {answers!r}")

    @staticmethod
    def ruled(right: str, prompt: str, targets: str, has_image: bool, run: Run) -> Result:
        """Judges by a rule, or by a caption."""
        rule, _, value = right.partition(":")
        is_right = {
            "no-target": value not in targets and "right answer" in targets,
            "assistant-target": "wind" in targets,
            "images": has_image or value == "0" and "what is it" in prompt,
            "error": False,
        }.get(rule, right in prompt and targets.strip() != "")
        shown = f"prompt {prompt!r}, targets {targets!r}"
        return Result("right") if is_right else Result("wrong" if run.said else "silent", f"{shown}; rule {right}")


def rendered(messages: list[dict[str, Any]], tools: Any) -> tuple[str, str]:
    """Prompt and targets of messages, as the template writes them."""
    tools = json.loads(tools) if isinstance(tools, str) else tools
    lines = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools or [])
    prompt, targets = f"<|im_start|>system\n# Tools\n{lines}<|im_end|>\n" if tools else "", ""
    for message in messages:
        parts = message.get("content") or ""
        text = parts if isinstance(parts, str) else "".join(part.get("text", "") for part in parts)
        thought = message.get("reasoning_content")
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or []]
        body = f"<think>{thought}</think>" if thought else ""
        body += text + "".join(f"<tool_call>{call}</tool_call>" for call in calls) + "<|im_end|>"
        prompt += f"<|im_start|>{message['role']}\n{body}\n"
        targets += body if message["role"] == "assistant" else ""
    return prompt, targets


def content(text: str) -> bytes:
    """Bytes of a file of a case: text, bytes written as `\\xNN`, or a picture."""
    if text.startswith("PNG number "):
        return example._png(56, 56, int(text.rsplit(" ", 1)[1]))
    if text.startswith("base64:"):
        return base64.b64decode(text.removeprefix("base64:"))
    if "\\x" in text:
        pieces = re.split(r"\\x([0-9a-f]{2})", text)
        return b"".join(
            bytes([int(piece, 16)]) if place % 2 else piece.encode("latin-1") for place, piece in enumerate(pieces)
        )
    return text.encode()


def byte_ids() -> dict[int, int]:
    """Token numbers of all bytes."""
    return {byte: byte for byte in range(256)}


def byte_tokenizer(special: dict[str, int]) -> dict[str, Any]:
    """A tokenizer of bytes, with these special tokens."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {letters[byte]: number for byte, number in byte_ids().items()} | special
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in special.items()],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


# Cases that are delivered otherwise than by the reference, on purpose.
REASONS = {
    "audio/mp3-id3-size-junk": "the length is that of the Info tag behind the ID3 tag; libsndfile refuses the file",
    "audio/mp3-id3-size-small": "the length is that of the Info tag behind the ID3 tag; libsndfile refuses the file",
    "tars/hardlink-body": "GNU tar reads on behind the payload of a link, as here; webdataset ends the archive",
}
KINDS = {"tars": Archives, "images": Images, "audio": Clips, "texts": Texts}
VERDICTS = ("right", "refused", "differs", "wrong", "silent", "open")


def main() -> int:
    """Prints a row for every case that is not right, and the numbers of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of cases.json")
    parser.add_argument("--only", default="", help="run the cases whose name starts with this")
    parser.add_argument("--all", action="store_true", help="print the right ones, too")
    arguments = parser.parse_args()
    cases = json.loads((arguments.directory / "cases.json").read_text())
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as scratch:
        kinds: dict[str, Any] = {}
        for name, case in cases.items():
            kind = name.split("/")[0]
            if not name.startswith(arguments.only):
                continue
            if kind not in kinds:
                (room := Path(scratch) / kind).mkdir()
                kinds[kind] = KINDS[kind](arguments.directory, room)
            result = kinds[kind].run(case)
            if name in REASONS and result.verdict in ("wrong", "silent"):
                result = Result("differs", REASONS[name])
            counts[kind][result.verdict] += 1
            if arguments.all or result.verdict != "right":
                print(f"{result.verdict:<8} {name:<32} {case['what']}: {result.detail[:600]}")
    print(f"\n{'':<8}" + "".join(f"{verdict:>9}" for verdict in VERDICTS))
    for kind, found in counts.items():
        print(f"{kind:<8}" + "".join(f"{found[verdict]:>9}" for verdict in VERDICTS))
    return int(any(found["silent"] for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
