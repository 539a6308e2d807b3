"""Tests measuring Hugging Face modules: every kind runs, and the Rust side reads the profile."""

from __future__ import annotations

import dataclasses
import tempfile
import unittest
from pathlib import Path

import dflop.torch
import torch
from test_torch_profile import command

try:
    import transformers
except ImportError:
    transformers = None

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
QUICK = {"tokens_max": 128, "seconds_max": 1.0, "repeats": 3}


def setUpModule() -> None:
    # With one thread, CPU time is measured, which a busy machine does not affect.
    torch.set_num_threads(1)


def unchecked(profile: dflop.torch.Profile) -> dflop.torch.Profile:
    """Returns a profile without held-out microbatches: one of a second may miss their bounds."""
    return dataclasses.replace(profile, held_out=())


@unittest.skipIf(transformers is None, "transformers is not installed")
class HuggingFaceModules(unittest.TestCase):
    def measured(self, **settings) -> dflop.torch.Profile:
        profile = dflop.torch.profile(model="tiny", **settings, **QUICK)
        self.assertTrue(all(row.microseconds > 0 for row in profile.rows))
        with tempfile.TemporaryDirectory() as directory:
            paths = unchecked(profile).write(directory)
            self.assertEqual([path.name for path in paths], [f"tiny-{name}.csv" for name in profile.reports])
            command("accuracy", "--profile", directory, "--observed", directory)
        return profile

    def llm(self) -> torch.nn.Module:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT))

    def test_a_language_model_runs_packed_and_with_its_loss(self) -> None:
        llm = self.llm()
        calls = []
        llm.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
        profile = self.measured(llm=llm)
        self.assertEqual(profile.widths["llm"], {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64})
        self.assertEqual({row.part for row in profile.rows}, {"whole", "linear", "attention"})
        self.assertEqual({row.layers for row in profile.rows}, {2})
        pack = next(call for call in calls if call["input_ids"].shape[1] == 128)
        self.assertEqual(sorted(pack), ["input_ids", "labels", "position_ids", "use_cache"])
        self.assertEqual(pack["position_ids"][0].tolist(), [*range(64)] * 2)
        self.assertTrue(any(row.phase == "backward" and row.microseconds > 1 for row in profile.rows))
        self.assertIsNone(llm.lm_head.weight.grad)

    def test_a_frozen_language_model_passes_a_gradient_to_its_inputs(self) -> None:
        profile = self.measured(llm=self.llm().requires_grad_(False))
        self.assertTrue(all(row.microseconds > 1 for row in profile.rows if row.part == "whole"))

    def test_a_tower_of_tiles_and_a_language_model_are_one_profile(self) -> None:
        config = transformers.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=42,
            patch_size=14,
        )
        profile = self.measured(encoder=transformers.SiglipVisionModel(config), llm=self.llm())
        vision = [row for row in profile.rows if row.module == "vision"]
        self.assertEqual({(row.part, row.tokens) for row in vision}, {("whole", 9)})
        self.assertEqual(max(row.batch for row in vision), 14)
        self.assertEqual(profile.widths["vision"], {"hidden": 32, "heads": 4, "ffn": 64})

    def test_a_tower_of_native_resolution_is_measured_over_sizes(self) -> None:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        config = Qwen2_5_VLVisionConfig(
            depth=3,
            hidden_size=32,
            intermediate_size=64,
            num_heads=4,
            out_hidden_size=32,
            fullatt_block_indexes=[1],
        )
        profile = self.measured(encoder=Qwen2_5_VisionTransformerPretrainedModel(config))
        self.assertTrue(all(round(n**0.5) ** 2 == n for n in profile.reports["vision"].lengths.points))
        self.assertEqual({row.layers for row in profile.rows if row.part == "attention"}, {1})
        self.assertEqual({row.layers for row in profile.rows if row.part == "linear"}, {3})
        self.assertEqual(profile.widths["vision"], {"hidden": 32, "heads": 4, "ffn": 64})

    def test_an_audio_tower_is_measured_over_windows(self) -> None:
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        config = transformers.WhisperConfig(
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            max_source_positions=30,
        )
        profile = self.measured(audio=WhisperEncoder(config))
        self.assertEqual({(row.part, row.tokens) for row in profile.rows}, {("whole", 30)})
        self.assertEqual(profile.widths["audio"], {"hidden": 32, "heads": 4, "ffn": 64})

    def test_the_cost_model_predicts_from_a_profile_and_refuses_one_of_other_widths(self) -> None:
        vision = transformers.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=42,
            patch_size=14,
        )
        profile = dflop.torch.profile(
            llm=self.llm(), encoder=transformers.SiglipVisionModel(vision), model="tiny", **QUICK
        )
        with tempfile.TemporaryDirectory() as directory:
            unchecked(profile).write(Path(directory, "profile"))
            transformers.Qwen2Config(**TEXT).save_pretrained(f"{directory}/llm")
            transformers.Qwen2Config(**{**TEXT, "hidden_size": 64}).save_pretrained(f"{directory}/other")
            vision.save_pretrained(f"{directory}/vision")
            Path(directory, "shapes.csv").write_text("tiles,seq_len\n1,100\n2,60\n1,30\n1,77\n")

            def simulate(llm: str) -> str:
                models = ["--model", f"{directory}/{llm}", "--model", f"{directory}/vision"]
                cluster = ["--gpus", "2", "--global-batch-size", "4", "--shapes", f"{directory}/shapes.csv"]
                return command("simulate", *models, *cluster, "--profile", f"{directory}/profile")

            self.assertIn("(measured)", simulate("llm"))
            with self.assertRaisesRegex(AssertionError, "lacks module llm of hidden=64.*hidden=32"):
                simulate("other")

    def test_half_precision_runs_under_autocast(self) -> None:
        types = []
        llm = self.llm()
        llm.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda module, args, output: types.append(output.dtype)
        )
        profile = self.measured(llm=llm, dtype=torch.bfloat16)
        self.assertEqual((set(types), profile.metadata["dtype"]), ({torch.bfloat16}, "bfloat16"))


if __name__ == "__main__":
    unittest.main()
