"""Stages of a split model: their weights, where these come from, and what cannot be split."""

from __future__ import annotations

import contextlib
import json
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import dflop
import dflop.torch
import safetensors.torch
import torch
import transformers
from split_models import FAMILIES, GEMMA, TEXT, write_model

STAGES = [
    ("vision", range(1), True, False),
    ("vision", range(1, 4), False, True),
    ("llm", range(2), True, False),
    ("llm", range(2, 4), False, True),
]
EMBEDDING = "model.language_model.embed_tokens.weight"


class Mesh:
    """A device mesh with TP ranks."""

    def __getitem__(self, name: str) -> Mesh:
        return self

    def size(self) -> int:
        return 2


class Read:
    """A tensor in a file; its name is kept when it is read."""

    def __init__(self, tensor: Any, name: str, names: set[str]) -> None:
        self._tensor, self._name, self._names = tensor, name, names

    def __getitem__(self, place: Any) -> Any:
        self._names.add(self._name)
        return self._tensor[place]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class File:
    """A file of safetensors that tells the names of tensors that are read."""

    def __init__(self, file: Any, names: set[str]) -> None:
        self._file, self._names = file, names

    def get_slice(self, name: str) -> Read:
        return Read(self._file.get_slice(name), name, self._names)

    def get_tensor(self, name: str) -> Any:
        self._names.add(name)
        return self._file.get_tensor(name)

    def __enter__(self) -> File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def names_read() -> Iterator[set[str]]:
    """Returns the names of the tensors that transformers reads from files."""
    names: set[str] = set()
    place, opened = transformers.modeling_utils, transformers.modeling_utils.safe_open

    def open_file(*arguments: Any, **settings: Any) -> File:
        return File(opened(*arguments, **settings), names)

    with mock.patch.object(place, "safe_open", open_file):
        yield names


def weights(stage: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in stage.model.named_parameters()}


class SplitWeights(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        cls.directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory())) / "model"
        cls.model: Any = write_model(cls.directory, FAMILIES["qwen2_5_vl"])
        cls.whole = dict(cls.model.named_parameters())

    def check(self, split: Any, wanted: Any) -> None:
        """Checks that stages have all weights, each once."""
        found: dict[str, torch.Tensor] = {}
        for place in STAGES:
            own = weights(split(*place))
            self.assertEqual(own.keys() & found.keys(), set())
            found |= own
        self.assertEqual(found.keys(), wanted.keys())
        for name, one in found.items():
            torch.testing.assert_close(one, wanted[name].detach(), rtol=0, atol=0, msg=name)

    def test_a_stage_reads_only_its_weights(self) -> None:
        split = dflop.torch.split(self.directory)
        for place in STAGES:
            with self.subTest(place), names_read() as names:
                own = weights(split(*place))
                self.assertEqual(len(names), len(own))
        self.check(split, self.whole)

    def test_weights_in_several_files(self) -> None:
        directory = self.copy({})
        self.model.save_pretrained(directory, max_shard_size="40KB")
        self.assertGreater(len(list(directory.glob("*.safetensors"))), 2)
        self.check(dflop.torch.split(directory), self.whole)

    def test_a_model_in_memory(self) -> None:
        self.whole[EMBEDDING].requires_grad_(False)
        self.addCleanup(self.whole[EMBEDDING].requires_grad_, True)
        split = dflop.torch.split(self.model)
        self.check(split, self.whole)
        stage = split(*STAGES[2])
        trained = {name for name, one in stage.model.named_parameters() if not one.requires_grad}
        self.assertEqual(trained, {EMBEDDING})
        with torch.no_grad():
            stage.model.get_parameter(EMBEDDING).add_(1)
        self.assertFalse(torch.equal(stage.model.get_parameter(EMBEDDING), self.whole[EMBEDDING]))

    def test_random_weights_depend_on_the_seed_only(self) -> None:
        config = self.model.config
        split = dflop.torch.split(config)
        whole = weights(split("llm", range(4), True, True)) | weights(split("vision", None, True, True))
        self.check(split, whole)
        self.assertGreater(float(whole["model.language_model.layers.3.mlp.up_proj.weight"].std()), 0.01)
        other = weights(dflop.torch.split(config, seed=1)("llm", range(4), True, True))
        self.assertFalse(torch.equal(other[EMBEDDING], whole[EMBEDDING]))

    def test_weights_are_where_a_model_uses_them_not_where_it_registers_them(self) -> None:
        text = {**TEXT, "num_hidden_layers": 2}
        vision = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "depth": 2}
        vision |= {"out_hidden_size": 32}
        glm = transformers.Glm4vConfig(text_config=text, vision_config=vision)
        vision = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "image_size": 56}
        vision |= {"num_attention_heads": 2, "vision_output_dim": 32, "projector_output_dim": 32}
        vision |= {"projector_input_dim": 32}
        llama = transformers.Llama4Config(
            text_config={**text, "intermediate_size_mlp": 48, "num_local_experts": 2}, vision_config=vision
        )
        for config, early, late in (
            (glm, ("patch_embed", "post_conv_layernorm"), ("downsample", "merger", "post_layernorm")),
            (llama, ("layernorm_pre", "class_embedding"), ("layernorm_post", "multi_modal_projector")),
        ):
            split = dflop.torch.split(config)
            first = " ".join(weights(split("vision", range(1), True, False)))
            last = " ".join(weights(split("vision", range(1, 2), False, True)))
            for word in early:
                self.assertEqual((word in first, word in last), (True, False), word)
            for word in late:
                self.assertEqual((word in first, word in last), (False, True), word)

    def test_a_type_of_weights(self) -> None:
        for source in (self.directory, self.model, self.model.config):
            stage = dflop.torch.split(source, dtype="bfloat16")(*STAGES[3])
            self.assertEqual({one.dtype for one in stage.parameters()}, {torch.bfloat16})

    def test_tied_weights_are_in_the_first_and_the_last_stage(self) -> None:
        directory = self.directory.parent / "tied"
        write_model(directory, FAMILIES["gemma3"])
        split = dflop.torch.split(directory)
        for place, expected in zip(STAGES, (False, False, True, True), strict=True):
            stage = split(*place)
            self.assertEqual(EMBEDDING in weights(stage), expected)
            self.assertEqual(getattr(stage, "tied_weights", []), [f"model.{EMBEDDING}"] * expected)
        alone = split("llm", range(4), True, True)
        self.assertEqual(alone.tied_weights, [])

    def copy(self, changes: dict[str, Any]) -> Path:
        """Copies the configuration of the model with other values."""
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        document = json.loads((self.directory / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps(document))
        return directory

    def test_a_checkpoint_without_a_weight(self) -> None:
        directory = self.copy({})
        tensors = safetensors.torch.load_file(self.directory / "model.safetensors")
        # transformers writes the names that older versions of the family had.
        (missing,) = (name for name in tensors if name.endswith("layers.2.mlp.up_proj.weight"))
        del tensors[missing]
        safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        split = dflop.torch.split(directory)
        split(*STAGES[2])
        message = "has no weight for `model.*layers.2.mlp.up_proj.weight`"
        with self.assertRaisesRegex(dflop.ModelError, message):
            split(*STAGES[3])

    def test_a_directory_without_weights(self) -> None:
        split = dflop.torch.split(self.copy({}))
        with self.assertRaisesRegex(dflop.ModelError, "could not load .*safetensors"):
            split(*STAGES[0])

    def test_no_model(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, "model: expected a checkpoint .*, found int"):
            dflop.torch.split(3)  # type: ignore[arg-type]
        with self.assertRaisesRegex(dflop.ModelError, "found none at .*config.json"):
            dflop.torch.split(self.directory / "nothing")

    def test_layers_that_the_model_does_not_have(self) -> None:
        split = dflop.torch.split(self.directory)
        self.assertEqual(split.layers, {"llm": 4, "vision": 4})
        for place, message in {
            ("audio", range(2), True, True): "the model has no `audio`, only llm, vision",
            ("llm", range(2, 6), False, True): "`llm` have layers up to 5, the model 4 layers: pass",
            ("llm", range(2), True, True): "`llm` have layers up to 1, the model 4 layers: pass",
            ("llm", None, True, False): "nothing gives the layers of a stage of `llm`: pass `layers=",
        }.items():
            with self.subTest(place), self.assertRaisesRegex(dflop.ConfigError, message):
                split(*place)

    def test_features_of_a_layer_before_the_last_stage(self) -> None:
        config = FAMILIES["llava"].config({"<image>": 520})
        config.vision_feature_layer = [-3, -2]
        split = dflop.torch.split(config)
        split("vision", range(2, 4), False, True)
        with self.assertRaisesRegex(dflop.ModelError, "`vision_feature_layer` -3 .* starts at layer 3: use"):
            split("vision", range(3, 4), False, True)

    def test_layers_that_read_more_than_rows(self) -> None:
        config = FAMILIES["gemma3"].config(dict.fromkeys(GEMMA, 0))
        config.text_config.num_kv_shared_layers = 2
        with self.assertRaisesRegex(dflop.ModelError, "`num_kv_shared_layers` read keys and values of other"):
            dflop.torch.split(config)

    def test_a_loss_of_routers(self) -> None:
        config = transformers.Qwen3VLMoeConfig(text_config={"num_experts": 4, "output_router_logits": True})
        with self.assertRaisesRegex(dflop.ModelError, "`output_router_logits` adds a loss of routers"):
            dflop.torch.split(config)

    def test_several_tp_ranks(self) -> None:
        split = dflop.torch.split(self.directory)
        with self.assertRaisesRegex(
            dflop.ConfigError, "`llm` has tp=2, .* call it without the mesh, then `parallelize_module`"
        ):
            split(*STAGES[2], Mesh())


if __name__ == "__main__":
    unittest.main()
