"""Tests whole models of Hugging Face: their parts are found, and each runs as in training."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import unittest
import warnings
from collections.abc import Iterator

import dflop
import dflop.torch
import packed_attention
import torch
import transformers
from dflop.torch._inputs import default_inputs
from dflop.torch._whole import LlmPart
from dflop.torch.model_parts import find_parts

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
TILES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
AUDIO = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "max_source_positions": 40,
    "num_mel_bins": 16,
}
MEDIUM = 90


def setUpModule() -> None:
    # With one thread, CPU time is measured, which a busy machine does not affect.
    torch.set_num_threads(1)


def qwen_vl() -> torch.nn.Module:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 2,
        "num_heads": 4,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config=vision,
        image_token_id=MEDIUM,
        video_token_id=MEDIUM + 1,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def llava() -> torch.nn.Module:
    vision = {"model_type": "clip_vision_model", **TILES, "image_size": 56, "patch_size": 14}
    text = {"model_type": "llama", **TEXT}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=MEDIUM)
    return transformers.LlavaForConditionalGeneration(config)


def llava_next() -> torch.nn.Module:
    vision = {"model_type": "clip_vision_model", **TILES, "image_size": 56, "patch_size": 14}
    text = {"model_type": "llama", **TEXT}
    config = transformers.LlavaNextConfig(text_config=text, vision_config=vision, image_token_index=MEDIUM)
    return transformers.LlavaNextForConditionalGeneration(config)


def intern_vl() -> torch.nn.Module:
    vision = {**TILES, "image_size": [56, 56], "patch_size": [14, 14]}
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT}, vision_config=vision, image_token_id=MEDIUM
    )
    return transformers.InternVLForConditionalGeneration(config)


def qwen_audio() -> torch.nn.Module:
    audio = {"model_type": "qwen2_audio_encoder", **AUDIO}
    text = {"model_type": "qwen2", **TEXT}
    config = transformers.Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=MEDIUM)
    return transformers.Qwen2AudioForConditionalGeneration(config)


def text_only() -> torch.nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT))


@contextlib.contextmanager
def calls_of(module: torch.nn.Module) -> Iterator[list[dict]]:
    """Yields the keyword arguments of a module's calls."""
    calls: list[dict] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    yield calls
    hook.remove()


def profiled(model: torch.nn.Module, **settings: object) -> dflop.torch.Profile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dflop.torch.profile(model, **{"tokens_max": 256, "seconds_max": 2.0, "repeats": 3} | settings)


class Parts(unittest.TestCase):
    def test_encoders_projectors_llm_and_head_are_found(self) -> None:
        for build, kind, tower, projectors, llm in (
            (qwen_vl, "vision", "Qwen2_5_VisionTransformerPretrainedModel", [], "Qwen2_5_VLTextModel"),
            (llava, "vision", "CLIPVisionModel", ["LlavaMultiModalProjector"], "LlamaModel"),
            (llava_next, "vision", "CLIPVisionModel", ["LlavaNextMultiModalProjector"], "LlamaModel"),
            (intern_vl, "vision", "InternVLVisionModel", ["InternVLMultiModalProjector"], "Qwen2Model"),
            (qwen_audio, "audio", "Qwen2AudioEncoder", ["Qwen2AudioMultiModalProjector"], "Qwen2Model"),
        ):
            model = build()
            for wrapped in (model, torch.nn.DataParallel(model)):
                parts = find_parts(wrapped)
                self.assertIs(parts.model, model)
                self.assertEqual(list(parts.encoders), [kind])
                found = parts.encoders[kind]
                self.assertEqual(type(found.tower).__name__, tower)
                self.assertEqual([type(one).__name__ for one in found.projectors], projectors)
                self.assertEqual(type(parts.llm).__name__, llm)
                self.assertIs(parts.head, model.lm_head)

    def test_two_encoders_have_their_own_projectors(self) -> None:
        class Both(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "language_model"):
                    self.add_module(name, torch.nn.Linear(2, 2))

        both = Both()
        parts = find_parts(both)
        self.assertEqual(parts.encoders["vision"].projectors, (both.embed_vision,))
        self.assertEqual(parts.encoders["audio"].projectors, (both.embed_audio,))
        self.assertIsNone(parts.head)

    def test_a_model_without_encoders_has_no_parts(self) -> None:
        pair = transformers.CLIPModel(transformers.CLIPConfig(text_config=TILES, vision_config=TILES))
        seq2seq = transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**AUDIO, decoder_layers=1, decoder_attention_heads=4)
        )
        for module in (text_only(), torch.nn.Linear(2, 2), torch.nn.Transformer(8, 2, 1, 1), pair, seq2seq):
            self.assertTrue(find_parts(module) is None, type(module).__name__)


class WholeModels(unittest.TestCase):
    def test_every_part_of_a_whole_model_runs(self) -> None:
        for build, kind, measured in (
            (qwen_vl, "vision", "Qwen2_5_VisionTransformerPretrainedModel"),
            (llava, "vision", "CLIPVisionModel+LlavaMultiModalProjector"),
            (llava_next, "vision", "CLIPVisionModel+LlavaNextMultiModalProjector"),
            (intern_vl, "vision", "InternVLVisionModel+InternVLMultiModalProjector"),
            (qwen_audio, "audio", "Qwen2AudioEncoder+Qwen2AudioMultiModalProjector"),
        ):
            model = build()
            parts = find_parts(model)
            modules = [parts.llm, parts.head, parts.encoders[kind].tower, *parts.encoders[kind].projectors]
            with self.subTest(build.__name__), contextlib.ExitStack() as stack:
                calls = [stack.enter_context(calls_of(module)) for module in modules]
                profile = profiled(model)
                self.assertEqual(list(profile.reports), [kind, "llm"])
                self.assertEqual(profile.model, type(model).__name__)
                self.assertTrue(all(calls), "every part runs")
                found = dict(pair.split("=") for pair in profile.metadata["measured"].split())
                self.assertEqual(found[kind], measured)
                self.assertEqual(found["llm"], f"{type(parts.llm).__name__}+head(Linear)+loss")
                self.assertEqual(profile.metadata["attention"], "sdpa")
                self.assertEqual(profile.metadata["packs"], "llm=masked")
                self.assertTrue(all(row.microseconds > 1 for row in profile.rows if row.part == "whole"))
                self.assertTrue(all(parameter.grad is None for parameter in model.parameters()))

    def test_gradients_reach_projector_and_embedding(self) -> None:
        model = llava()
        reached = set()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
        profiled(model)
        for name in ("projector.linear_2.weight", "embed_tokens.weight", "lm_head.weight", "k_proj.weight"):
            self.assertTrue(any(one.endswith(name) for one in reached), name)

    def test_a_frozen_encoder_and_llm_leave_the_projector(self) -> None:
        model = llava()
        model.requires_grad_(False)
        model.model.multi_modal_projector.requires_grad_(True)
        profile = profiled(model)
        self.assertEqual(profile.metadata["trained"], "vision=partly llm=nothing")
        # The LLM passes the gradient on to the features.
        self.assertTrue(all(row.microseconds > 1 for row in profile.rows if row.part == "whole"))

    def test_the_llm_gets_packed_rows_as_loaders_deliver_them(self) -> None:
        for build, rows in ((qwen_vl, (4, 1)), (llava, (1,)), (text_only, (1,))):
            model = build()
            part = LlmPart(parts) if (parts := find_parts(model)) else model
            make, _ = default_inputs("llm", part)
            inputs = make([3, 5])
            self.assertEqual(inputs["position_ids"].shape, (*rows, 8))
            self.assertEqual(inputs["position_ids"].flatten()[:8].tolist(), [0, 1, 2, 0, 1, 2, 3, 4])
            self.assertFalse(inputs["use_cache"])
            if parts:
                ids = torch.cat([make([500])["input_ids"] for _ in range(20)])
                self.assertFalse(torch.isin(ids, torch.tensor([MEDIUM])).any())
            self.assertTrue(torch.isfinite(part(**inputs).loss))

    def test_settings_of_parts_are_given_by_name(self) -> None:
        profile = profiled(llava(), layers={"vision": 7})
        layers = {(row.module, row.layers) for row in profile.rows if row.part == "whole"}
        self.assertEqual(layers, {("vision", 7), ("llm", 2)})
        with self.assertRaisesRegex(TypeError, "a whole model has its own encoders"):
            dflop.torch.profile(llava(), encoder=torch.nn.Linear(2, 2))
        with self.assertRaisesRegex(TypeError, "vision: CLIPVisionModel refuses the inputs"):
            profiled(
                llava(),
                make_inputs={"vision": lambda lengths: {"pixels": torch.ones(1)}},
                item_tokens={"vision": 16},
            )


class Packs(unittest.TestCase):
    def test_attention_is_found_to_keep_boundaries_or_not(self) -> None:
        self.assertEqual(profiled(text_only()).metadata["packs"], "llm=masked")
        self.assertEqual(profiled(packed_attention.use(text_only())).metadata["packs"], "llm=separate")
        self.assertEqual(profiled(packed_attention.use(qwen_vl())).metadata["packs"], "llm=separate")

    def test_packs_whose_sequences_attend_to_each_other_are_warned_of(self) -> None:
        # These positions are rows of images without those of the text, so the model sees no boundary.
        llm = qwen_vl().model.language_model

        def make(lengths: list[int]) -> dict[str, object]:
            inputs = default_inputs("llm", llm)[0](lengths)
            return {**inputs, "position_ids": inputs["position_ids"][1:]}

        with self.assertWarnsRegex(UserWarning, "llm: sequences of a packed row attend to those before"):
            profile = dflop.torch.profile(llm, make_inputs=make, tokens_max=128, seconds_max=1.0, repeats=3)
        self.assertEqual(profile.metadata["packs"], "llm=joined")


class CostModels(unittest.TestCase):
    def test_the_cost_model_predicts_microbatches_as_the_profile_does(self) -> None:
        model = llava()
        # A profile of two seconds may miss the bounds of held-out microbatches.
        profile = dataclasses.replace(profiled(model), held_out=())
        with tempfile.TemporaryDirectory() as directory:
            profile.write(f"{directory}/profile")
            model.config.save_pretrained(f"{directory}/model")
            costs = dflop.CostModel(f"{directory}/model", device=f"{directory}/profile")
            for lengths in ([30, 77], [200], [5] * 20):
                found = costs.microbatch_time("llm", lengths) / 1000
                self.assertAlmostEqual(found / profile.predict_microseconds("llm", lengths), 1, places=3)


if __name__ == "__main__":
    unittest.main()
