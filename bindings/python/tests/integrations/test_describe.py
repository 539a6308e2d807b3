"""Describes models of transformers: counts against dflop's own numbers, and answers to bad checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dflop
import torch
import transformers
from dflop._description import (
    checkpoint,
    command,
    counting,
    document,
    encoder,
    fits,
    implicit,
    media,
    parts,
    shape_mode,
)

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


def module(description: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in description["modules"] if one["module"] == name)
    return found


class Checkpoints(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name) / "checkpoint"
        self.directory.mkdir()
        self.target = Path(scratch.name) / "model.json"

    def describe(self, config: dict[str, Any] | str) -> dict[str, Any]:
        text = config if isinstance(config, str) else json.dumps(config)
        (self.directory / "config.json").write_text(text)
        return dflop.hugging_face.describe(self.directory, path=self.target)


class Describe(Checkpoints):
    def assert_refused(self, config: dict[str, Any] | str, message: str) -> None:
        with self.subTest(message), self.assertRaisesRegex(dflop.ModelError, message):
            self.describe(config)
        self.assertFalse(self.target.exists())

    def test_a_vision_model_counts_like_dflop(self) -> None:
        shutil.rmtree(self.directory)
        dflop.example.write_model(self.directory)
        description = dflop.hugging_face.describe(self.directory, path=self.target)
        self.assertEqual(json.loads(self.target.read_text()), description)
        own = dflop.models(str(self.directory))
        self.assertEqual(description["parameters"], own["parameters"])
        counted = {one["module"]: one["parameters"] for one in description["modules"]}
        self.assertEqual(counted, {one["module"]: one["parameters"] for one in own["modules"]})
        rule = module(description, "vision")["token_rule"]
        self.assertEqual((rule["kind"], rule["rule"]["rule"]), ("rule", "native"))
        self.assertGreater(rule["checked"], 300)
        patterns = [run["attention"]["pattern"] for run in module(description, "llm")["layer_runs"]]
        self.assertEqual(patterns, ["causal"])

    def test_layers_of_a_text_model_have_closed_formulas(self) -> None:
        description = self.describe(QWEN3)
        (run,) = module(description, "llm")["layer_runs"]
        attention, mlp = 64 * 16 * (4 + 2 + 2 + 4), 3 * 64 * 128
        self.assertEqual(run["flops_forward"], {"per_token": 2 * (attention + mlp), "per_pair": 4 * 64})
        self.assertEqual(run["flops_backward"], {"per_token": 4 * (attention + mlp), "per_pair": 8 * 64})
        self.assertEqual((run["first"], run["count"], run["message_width"]), (0, 4, 64))
        self.assertEqual(module(description, "llm")["head"]["flops_forward"], {"per_token": 2 * 64 * 512})

    def test_windows_are_seen_in_the_masks(self) -> None:
        types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        description = self.describe(
            QWEN3 | {"layer_types": types, "sliding_window": 300, "use_sliding_window": True}
        )
        runs = module(description, "llm")["layer_runs"]
        sliding, causal = {"pattern": "sliding", "window": 300}, {"pattern": "causal", "window": None}
        found = [(run["first"], run["count"], run["attention"]) for run in runs]
        self.assertEqual(found, [(0, 2, sliding), (2, 1, causal), (3, 1, sliding)])

    def test_experts_count_those_that_a_token_goes_through(self) -> None:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        description = self.describe(QWEN3 | experts | {"model_type": "qwen3_moe"})
        (run,) = module(description, "llm")["layer_runs"]
        each = 3 * 64 * 32
        self.assertEqual(run["experts"], {"count": 8, "parameters_each": each, "per_token": 2})
        router = 64 * 8
        weights = 64 * 16 * (4 + 2 + 2 + 4) + router + 2 * each
        self.assertEqual(run["flops_forward"]["per_token"], 2 * weights)

    def test_bad_checkpoints_are_refused_with_what_to_do(self) -> None:
        with self.assertRaisesRegex(dflop.ModelError, "found none at"):
            dflop.hugging_face.describe(self.directory, path=self.target)
        code = {"auto_map": {"AutoConfig": "configuration_kite.KiteConfig"}}
        self.assert_refused("{", "could not read")
        self.assert_refused("[]", "expected an object")
        self.assert_refused({}, "has no `model_type`")
        self.assert_refused({"model_type": "kite"}, 'does not know the `model_type` "kite"')
        self.assert_refused({"model_type": "kite"} | code, "trust_remote_code=True")
        t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
        self.assert_refused(t5, "an encoder that the decoder reads by cross-attention")
        self.assert_refused({"model_type": "vit"}, "no generating model")
        self.assert_refused(QWEN3 | {"hidden_size": "wide"}, "does not read|cannot be built")
        self.assert_refused({"model_type": "llava"}, "no processor that transformers loads")

    def test_what_is_no_checkpoint_is_named(self) -> None:
        for name, content, message in (
            ("kite.gguf", "GGUF", "converted weights: describe the checkpoint that they"),
            (
                "adapter_config.json",
                '{"base_model_name_or_path": "org/kite"}',
                "is an adapter, .* `org/kite`",
            ),
            ("adapter_config.json", "{", "is an adapter, describe its base model"),
            ("model_index.json", "{}", "a pipeline of diffusers"),
            ("params.json", "{}", "the one for transformers"),
            ("snapshots/1f/config.json", "{}", "describe .*/snapshots/1f$"),
            ("llm/config.json", "{}", "describe .*/llm$"),
        ):
            with self.subTest(name):
                shutil.rmtree(self.directory)
                (self.directory / name).parent.mkdir(parents=True)
                (self.directory / name).write_text(content)
                with self.assertRaisesRegex(dflop.ModelError, f"`config.json`, found none at .*{message}"):
                    dflop.hugging_face.describe(self.directory, path=self.target)
                self.assertFalse(self.target.exists())
        weights = self.directory / "kite.gguf"
        weights.write_text("GGUF")
        for path, message in (
            (weights, "is a file of weights"),
            (self.directory / "llm" / "config.json", "config.json is a file"),
            ("org/kite", "hf download org/kite --local-dir kite"),
        ):
            with self.subTest(path), self.assertRaisesRegex(dflop.ModelError, message):
                dflop.hugging_face.describe(path, path=self.target)

    def test_configurations_of_other_libraries_are_named(self) -> None:
        self.assert_refused({"_class_name": "UNet2DConditionModel"}, "a configuration of diffusers")
        self.assert_refused({"architecture": "resnet50", "num_classes": 10}, "a configuration of timm")
        self.assert_refused('{"model_type": "qwen3", "num_hid', "could not read .*config.json")
        (self.directory / "config.json").write_bytes(json.dumps(QWEN3).encode("utf-16"))
        with self.assertRaisesRegex(dflop.ModelError, "could not read .*config.json"):
            dflop.hugging_face.describe(self.directory)

    def test_classes_that_write_no_text_are_named(self) -> None:
        self.assert_refused(QWEN3 | {"architectures": ["Qwen3Model"]}, "has no head: .*`Qwen3ForCausalLM`")
        names: Any
        for names in ("Qwen3ForCausalLM", ["pipeline"], ["KiteForCausalLM"]):
            self.assertEqual(self.describe(QWEN3 | {"architectures": names})["modules"][0]["module"], "llm")

    def test_processors_that_do_not_load_or_run_are_named(self) -> None:
        settings = {"image_processor_type": "KiteImageProcessor", "processor_class": "KiteProcessor"}
        code = {"auto_map": {"AutoProcessor": "processing_kite.KiteProcessor"}}
        for changes, message in (
            (settings, "processor that transformers loads: correct its files"),
            (settings | code, "the processor of .* is Python code .*--trust-remote-code"),
            ({"size": {"height": 32}, "min_pixels": None}, "correct its files, .*size must have"),
            ({"patch_size": 0}, "makes no inputs of image: .*; correct the settings in `preprocessor"),
            (None, "processor that transformers loads: copy `preprocessor_config.json`"),
        ):
            with self.subTest(message):
                shutil.rmtree(self.directory)
                dflop.example.write_model(self.directory)
                file = self.directory / "preprocessor_config.json"
                if changes is None:
                    file.unlink()
                else:
                    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
                with self.assertRaisesRegex(dflop.ModelError, message):
                    dflop.hugging_face.describe(self.directory, path=self.target)
                self.assertFalse(self.target.exists())

    def test_texts_with_which_a_processor_ignores_media_are_passed_over(self) -> None:
        def process(text: list[str], audio: Any = None, **_: Any) -> dict[str, Any]:
            return {"input_ids": [[1]]} | ({"input_features": audio} if "[clip]" in text[0] else {})

        clip = media.clip(1600)
        with self.assertRaisesRegex(dflop.ModelError, 'ignores the audio with the text "<|AUDIO|>"'):
            media.processed(process, "audio", clip)
        process.audio_token = "[clip]"  # type: ignore[attr-defined]
        made, text = media.processed(process, "audio", clip)
        self.assertEqual((text, made["input_features"]), ("[clip]", [clip]))

    def test_a_head_of_several_layers_is_counted_where_masks_depend_on_weights(self) -> None:
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "embedding_size": 64, "intermediate_size": 128}
        config = sizes | {"model_type": "roformer", "num_attention_heads": 4, "vocab_size": 512}
        description = self.describe(config | {"architectures": ["RoFormerForCausalLM"]})
        (llm,) = description["modules"]
        self.assertEqual(llm["parameters"], description["parameters"])
        # A square matrix before the output embeddings, which are the input's.
        self.assertEqual(llm["head"]["flops_forward"], {"per_token": 2 * 64 * (64 + 512)})

    def test_towers_that_the_decoder_attends_to_are_named(self) -> None:
        text = {"model_type": "blip_text_model", "num_hidden_layers": 2, "hidden_size": 64}
        text |= {
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 512,
            "encoder_hidden_size": 64,
        }
        vision = {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
        }
        config = transformers.BlipConfig(text_config=text, vision_config=vision)
        model = checkpoint.build(config)
        opened = checkpoint.Checkpoint(self.directory, config, model, None)
        with self.assertRaisesRegex(dflop.ModelError, "read by the decoder's cross-attention"):
            document.from_parts(opened, "")

    def test_a_checkpoint_of_a_newer_transformers_is_told_so(self) -> None:
        newer = QWEN3 | {"hidden_size": "wide", "transformers_version": "99.1.0"}
        self.assert_refused(newer, "saved by transformers 99.1.0, and .* pip install --upgrade transformers")
        with self.assertRaises(dflop.ModelError) as raised:
            self.describe(newer | {"transformers_version": transformers.__version__})
        self.assertNotIn("upgrade", str(raised.exception))

    def test_files_that_are_no_descriptions_stay(self) -> None:
        self.describe(QWEN3)
        before = self.target.read_bytes()
        self.describe(QWEN3)  # A description is replaced.
        self.assertEqual(self.target.read_bytes(), before)
        config = self.directory / "config.json"
        text = config.read_text()
        for path, message in (
            (config, "another file than a description"),
            (self.directory, "it is a directory"),
            (self.directory / "none" / "model.json", "none is not a directory"),
            (Path("/dev/null"), "another file than a description"),
        ):
            with self.subTest(path), self.assertRaisesRegex(OSError, f"could not write .*{message}"):
                dflop.hugging_face.describe(self.directory, path=path)
        self.assertEqual(config.read_text(), text)
        self.assertEqual([one.name for one in self.directory.iterdir()], ["config.json"])

    def test_a_file_that_cannot_be_written_leaves_nothing(self) -> None:
        with self.assertRaises(TypeError):
            document.write({"format": object()}, self.target)
        self.assertEqual(list(self.target.parent.iterdir()), [self.directory])
        document.write({"format": document.FORMAT}, self.target)
        mask = os.umask(0)
        os.umask(mask)
        self.assertEqual(self.target.stat().st_mode & 0o777, 0o666 & ~mask)

    def test_code_in_a_checkpoint_that_fails_is_named(self) -> None:
        (self.directory / "configuration_kite.py").write_text("raise RuntimeError('no wind')")
        config = {"model_type": "kite", "auto_map": {"AutoConfig": "configuration_kite.KiteConfig"}}
        (self.directory / "config.json").write_text(json.dumps(config))
        with self.assertRaisesRegex(dflop.ModelError, "no wind"):
            dflop.hugging_face.describe(self.directory, trust_remote_code=True, path=self.target)
        self.assertFalse(self.target.exists())

    def test_an_old_transformers_is_named(self) -> None:
        old = SimpleNamespace(__version__="4.57.1")
        with mock.patch.dict(sys.modules, {"transformers": old}):
            self.assert_refused(QWEN3, "expected transformers 5.0 or newer, found 4.57.1")

    def test_a_module_off_its_polynomial_is_named(self) -> None:
        layer = transformers.models.qwen3.modeling_qwen3.Qwen3MLP
        forward = layer.forward

        def uneven(one: Any, states: Any) -> Any:
            repeated = 1 + (states.shape[1] in (768, 3072))  # at short and at long lengths
            return sum(forward(one, states) for _ in range(repeated))

        layer.forward = uneven
        try:
            self.assert_refused(QWEN3, r"FLOPs of `model.layers.0` are no polynomial.* at most 0.5%")
        finally:
            layer.forward = forward

    def test_a_model_without_a_device_of_shapes_is_refused(self) -> None:
        layer = transformers.models.qwen3.modeling_qwen3.Qwen3MLP
        forward = layer.forward
        layer.forward = lambda one, states: forward(one, states) * states.sum().item()
        try:
            self.assert_refused(QWEN3, "does not run on shapes alone, in")
        finally:
            layer.forward = forward

    def test_nothing_reaches_the_network_or_weights(self) -> None:
        config = transformers.Qwen3Config(**{key: one for key, one in QWEN3.items() if key != "model_type"})
        model = checkpoint.build(config)
        self.assertTrue(all(parameter.is_meta for parameter in model.parameters()))
        self.assertLessEqual(fits.ERROR_MAX, 0.005)


class ByMedium(torch.nn.Module):
    """Returns one output for each of two media, as mergers of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False, device="meta")

    def forward(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [self.inner(states[:3]), self.inner(states[3:])]


class Counts(unittest.TestCase):
    def test_a_backward_pass_begins_at_the_last_of_several_outputs(self) -> None:
        stem, merger = torch.nn.Linear(8, 8, bias=False, device="meta"), ByMedium()
        states = torch.empty((7, 8), device="meta")
        counted = counting.count(
            lambda: merger(stem(states)), [merger], [*stem.parameters(), *merger.parameters()]
        )
        forward = 2 * 7 * 8 * 8
        self.assertEqual((counted.modules[0].forward, counted.modules[0].backward), (forward, 2 * forward))
        # The stem's weights have gradients, its input has none.
        self.assertEqual((counted.total.forward, counted.total.backward), (2 * forward, 3 * forward))

    def test_tokens_are_routed_to_experts_in_turn(self) -> None:
        scores = torch.empty((6, 4), device="meta")
        with shape_mode.shapes_only():
            self.assertTrue(scores.topk(2).indices.is_meta)
            with shape_mode.made_up_routes():
                values, experts = scores.topk(2)
        self.assertTrue(values.is_meta)
        self.assertEqual(torch.bincount(experts.flatten()).tolist(), [3, 3, 3, 3])

    def test_experts_that_run_one_by_one_are_counted(self) -> None:
        block = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
        config = transformers.Qwen3MoeConfig(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, hidden_size=64
        )
        config._experts_implementation = "eager"
        with torch.device("meta"):
            experts = block(config)
        states, weights = torch.empty((16, 64), device="meta"), torch.empty((16, 8), device="meta")

        def run() -> Any:
            chosen, places = weights.topk(2)
            return experts(states, places, chosen)

        with self.assertRaises(NotImplementedError):
            counting.count(run, [], experts.parameters())
        with shape_mode.made_up_routes():
            counted = counting.count(run, [], experts.parameters())
        self.assertEqual(counted.total.forward, 2 * 16 * 2 * 3 * 64 * 32)

    def test_a_tower_whose_layers_are_not_all_of_it_is_one_layer(self) -> None:
        model = torch.nn.Module()
        model.tower, model.llm = torch.nn.Module(), torch.nn.Module()
        model.tower.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
        model.tower.stem, model.connector = torch.nn.Linear(64, 64), torch.nn.Linear(4, 8)
        model.get_decoder = lambda: model.llm
        ran = ["tower", "tower.stem", "tower.layers.0", "tower.layers.1", "connector"]
        found = encoder.Encoder(
            "image", parts.Layers("tower.layers", tuple(model.tower.layers)), ["connector"], ran
        )
        whole = encoder.as_whole(model, found)
        self.assertEqual((whole.layers.path, whole.layers.modules), ("tower", (model.tower,)))
        self.assertEqual(whole.connectors, ["connector"])

    def test_a_model_that_also_speaks_is_described_by_its_writing_part(self) -> None:
        omni = transformers.Qwen2_5OmniConfig()
        self.assertIs(checkpoint.writing_config(omni), omni.thinker_config)
        qwen3 = transformers.Qwen3Config()
        self.assertIs(checkpoint.writing_config(qwen3), qwen3)


class DescribedModels(Checkpoints):
    """Descriptions as models of commands and loaders, against families by hand."""

    def costs(self, model: str, **sample: Any) -> dict[str, Any]:
        return dict(dflop.CostModel(model, device="h100").cost(**sample))

    def assert_near(self, one: float, other: float) -> None:
        self.assertLess(abs(one - other), 1e-3 * other + 1e-12)

    def test_text_models_cost_what_their_families_do(self) -> None:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        for config in (QWEN3, QWEN3 | experts | {"model_type": "qwen3_moe"}):
            with self.subTest(config["model_type"]):
                self.describe(config)
                described, known = (dflop.models(str(one)) for one in (self.target, self.directory))
                self.assertEqual(described["family"], "described")
                for count in ("parameters", "active_parameters", "modules"):
                    self.assertEqual(described[count], known[count])
                self.assertEqual(described["description"]["modules"][0]["costs"], "sizes")
                for tokens in (1, 1000, 9000):
                    counts = {"text_tokens": tokens, "target_tokens": tokens}
                    one, other = (self.costs(str(path), **counts) for path in (self.target, self.directory))
                    self.assertEqual(one, other)

    def test_a_vision_model_is_planned_and_balanced_like_its_family(self) -> None:
        shutil.rmtree(self.directory)
        dflop.example.write_model(self.directory)
        description = dflop.hugging_face.describe(self.directory, path=self.target)
        markers = module(description, "vision")["token_rule"]["marker_tokens"] or 0
        for size in ((640, 480), (100, 100), (1000, 333)):
            one, other = (self.costs(str(path), images=[size]) for path in (self.target, self.directory))
            self.assertEqual(one["encoder_tokens"], other["encoder_tokens"])
            self.assertEqual(one["tokens"], other["tokens"] - 2 + markers)
            self.assert_near(one["seconds"]["vision"], other["seconds"]["vision"])
        shapes = self.target.with_name("shapes.csv")
        shapes.write_text("patches,seq_len\n" + "".join(f"{64 * at},{40 * at}\n" for at in range(1, 17)))
        job: dict[str, Any] = {"gpus": 2, "global_batch_size": 4, "device": "h100", "batches": 4}
        plans = [
            dflop.plan_parallelism(shapes=shapes, model=str(path), space={"kinds": "basic"}, **job)
            for path in (self.target, self.directory)
        ]
        self.assertEqual(*([plan["encoder"], plan["llm"], plan["microbatches"]] for plan in plans))
        shards = Path(dflop.example.directory()) / "shards"
        simulated = dflop.simulate(
            str(shards), model=str(self.target), global_batch_size=16, dp_size=2, microbatches=2, steps=1
        )
        self.assertEqual([one["name"] for one in simulated["strategies"]], ["data-blind", "lpt", "dflop"])
        loader = dflop.BalancedLoader(
            str(shards),
            model=str(self.target),
            tokenizer=False,
            global_batch_size=16,
            microbatches=2,
            steps=1,
        )
        (step,) = loader
        self.assertEqual(sum(len(one.samples) for one in step.microbatches), 16)

    def test_a_type_without_a_family_is_described_where_it_is_named(self) -> None:
        config: dict[str, Any] = {"model_type": "starcoder2", "num_hidden_layers": 3, "hidden_size": 64}
        config |= {
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        }
        (self.directory / "config.json").write_text(json.dumps(config))
        cache = self.target.parent / "cache"
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}):
            costs = dflop.CostModel(str(self.directory), device="h100")
            described = dflop.models(str(self.directory))
            self.assertEqual(len(list((cache / "dflop" / "models").iterdir())), 1)
            with mock.patch.object(implicit, "_versions", return_value=None):
                with self.assertRaisesRegex(dflop.ConfigError, "`dflop describe DIRECTORY"):
                    dflop.models(str(self.directory))
        self.assertEqual(command.run(command.parse([str(self.directory), "-o", str(self.target)])), 0)
        own = json.loads(self.target.read_text())
        self.assertEqual(described["parameters"], own["parameters"])
        (run,) = module(own, "llm")["layer_runs"]
        head = module(own, "llm")["head"]
        flops = 0
        for way in ("forward", "backward"):
            terms = run[f"flops_{way}"]
            flops += 3 * (1000 * terms["per_token"] + 1000**2 * terms["per_pair"] // 2)
            flops += 1000 * head[f"flops_{way}"]["per_token"]
        on_cpu = dflop.CostModel(str(self.target), device="cpu")
        seconds = on_cpu.cost(text_tokens=1000, target_tokens=1000)["seconds"]["llm"]
        self.assert_near(seconds * 40_000 * 1e6, flops)
        self.assertEqual(costs.modules, ["llm"])
        # In the directory, the description needs no Python.
        shutil.copy(self.target, self.directory / "model.json")
        self.assertEqual(dflop.models(str(self.directory))["files"], ["model.json"])

    def test_a_known_type_with_an_unknown_decoder_is_described(self) -> None:
        for decoder, is_by_hand in (("llama", True), ("phi3", False), ("of another package", True)):
            with self.subTest(decoder):
                config = {"model_type": "llava", "text_config": {"model_type": decoder}}
                self.assertEqual(implicit._is_by_hand(config), is_by_hand)

    def test_wrong_arguments_and_checkpoints_end_with_their_status(self) -> None:
        with self.assertRaises(SystemExit) as ended, mock.patch("sys.stderr"):
            command.parse(["--kite"])
        self.assertEqual(ended.exception.code, 2)
        with mock.patch("sys.stderr"):
            self.assertEqual(command.run(command.parse([str(self.directory / "none")])), 1)


if __name__ == "__main__":
    unittest.main()
