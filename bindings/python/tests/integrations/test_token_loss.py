"""Tests `dflop.torch.loss`: a mean over all targets of a global batch, for models of every kind."""

from __future__ import annotations

import tempfile
import unittest
from dataclasses import dataclass
from unittest import mock

import dflop.torch
import torch
import torch.distributed as dist
from dflop.torch import token_loss
from torch import nn
from torch.nn import functional
from trainers import WithData, example

pytorch = example("pytorch")
WORDS, IGNORED = 50, -100


@dataclass
class Output:
    """What models return."""

    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


class Toy(nn.Module):
    """A small language model, whose loss is a mean and ignores `num_items_in_batch`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, input_ids, labels=None, **others) -> Output:
        logits = self.head(self.words(input_ids))
        return Output(logits, None if labels is None else self.mean(logits, labels))

    def mean(self, logits, labels):
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Lengthening(Toy):
    """Puts two positions before rows that start with the word 0, as models that place media themselves."""

    def forward(self, input_ids, labels=None, **others):
        if int(input_ids[0, 0]) == 0:
            input_ids = functional.pad(input_ids, (2, 0), value=1)
            labels = None if labels is None else functional.pad(labels, (2, 0), value=IGNORED)
        return super().forward(input_ids, labels)


class Fused(Toy):
    """Returns no logits where it computes the loss."""

    def forward(self, input_ids, labels=None, **others):
        output = super().forward(input_ids, labels)
        return output if labels is None else Output(None, output.loss)


class Routed(Toy):
    """Adds an auxiliary loss to its own."""

    router_aux_loss_coef = 0.5

    def forward(self, input_ids, labels=None, **others):
        output = super().forward(input_ids, labels)
        output.aux_loss = self.words(input_ids).square().mean()
        if labels is not None:
            output.loss = output.loss + self.router_aux_loss_coef * output.aux_loss
        return output


class Smoothed(Toy):
    """Has a loss that is no cross entropy."""

    def mean(self, logits, labels):
        logits = logits[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.3)


def microbatch(rows: list[list[int]], targets: list[int], total: int, ranks: int = 1) -> dflop.Microbatch:
    """Makes a microbatch of rows, of which the last `targets` tokens are targets."""
    ids = torch.tensor(rows)
    labels = torch.full_like(ids, IGNORED)
    for row, count in enumerate(targets):
        labels[row, ids.shape[1] - count :] = ids[row, ids.shape[1] - count :]
    made = dflop.Microbatch({"input_ids": ids, "labels": labels, "use_cache": False})
    made.target_tokens, made.loss_scale_sum, made.cu_seqlens = sum(targets), ranks / total, None
    made.loss_scale = made.target_tokens * made.loss_scale_sum
    return made


def parts(first_word: int = 2) -> list[dflop.Microbatch]:
    """Makes microbatches with 12 targets in all, of which one has no target and one is a single token."""
    rows = [[[2, 5, 7, 9, 4]], [[first_word, 3, 8, 1, 6], [9, 9, 4, 2, 3]], [[4, 4, 1]], [[7]]]
    counts = [[2], [3, 4], [0], [0]]
    several = [[[5, 6, 7, 8, 9, 10]]], [[3]]
    made = [microbatch(row, count, 12) for row, count in zip(rows, counts, strict=True)]
    return made + [microbatch(row, count, 12) for row, count in zip(*several, strict=True)]


def by_hand(model: nn.Module, microbatches: list[dflop.Microbatch]) -> torch.Tensor:
    """Returns the mean over all targets of the global batch."""
    sums, targets = [], 0
    for one in microbatches:
        logits = model(one["input_ids"]).logits
        labels = one["labels"]
        # Media that a model places before the words have no targets.
        logits = logits[:, logits.shape[1] - labels.shape[1] :]
        wanted = labels[:, 1:].flatten()
        sums.append(functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted, reduction="sum"))
        targets += int((wanted != IGNORED).sum())
    return torch.stack(sums).sum() / targets


class Kinds(unittest.TestCase):
    def check(self, model: nn.Module, microbatches: list[dflop.Microbatch], wrapped: object = None) -> None:
        wanted = by_hand(model, microbatches)
        wanted_gradients = torch.autograd.grad(wanted, list(model.parameters()))
        model.zero_grad()
        found = [dflop.torch.loss(model if wrapped is None else wrapped, one) for one in microbatches]
        for one in found:
            one.backward()
        self.assertAlmostEqual(sum(one.item() for one in found), wanted.item(), places=5)
        for parameter, gradient in zip(model.parameters(), wanted_gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)

    def test_models_of_every_kind_have_the_loss_of_the_global_batch(self) -> None:
        for kind in (Toy, Lengthening, Fused):
            for first_word in (0, 2):
                with self.subTest(kind.__name__, first_word=first_word):
                    self.check(kind(), parts(first_word))

    def test_a_whole_step_has_the_loss_and_gradients_of_its_microbatches(self) -> None:
        step = dflop.Step(0, parts(), 12, "", 0.0, 0.0)
        toy, compiled, lengthening = Toy(), Toy(), Lengthening()
        for model, wrapped in (
            (toy, toy),
            (compiled, torch.compile(compiled, backend="eager")),
            (lengthening, lengthening),
        ):
            wanted = by_hand(model, parts())
            gradients = torch.autograd.grad(wanted, list(model.parameters()))
            found = dflop.torch.backward(wrapped, step)
            self.assertAlmostEqual(found.item(), wanted.item(), places=5)
            self.assertFalse(found.requires_grad)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)

    def test_the_order_of_microbatches_is_free(self) -> None:
        for kind in (Toy, Lengthening, Fused):
            with self.subTest(kind.__name__):
                self.check(kind(), parts(0)[::-1])

    def test_labels_are_kept_from_a_model_that_was_seen(self) -> None:
        model, labeled = Toy(), []
        model.register_forward_pre_hook(
            lambda module, args, given: labeled.append("labels" in given), with_kwargs=True
        )
        for one in parts():
            dflop.torch.loss(model, one)
        self.assertEqual(labeled, [True, False, False, False, False])

    def test_wrappers_are_seen_through(self) -> None:
        model = Toy()
        self.check(model, parts(), torch.compile(model, backend="eager"))
        routed = Routed()
        self.assertIs(token_loss.unwrapped(torch.compile(nn.DataParallel(routed))), routed)
        with tempfile.NamedTemporaryFile() as store:
            dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
            self.addCleanup(dist.destroy_process_group)
            for kind in (Toy, Lengthening, Fused):
                model = kind()
                self.check(model, parts(0), nn.parallel.DistributedDataParallel(model))

    def test_a_router_has_the_share_of_the_targets(self) -> None:
        model, microbatches = Routed(), parts()
        losses = [dflop.torch.loss(model, one) for one in microbatches]
        routers = [model(one["input_ids"]).aux_loss * one.target_tokens / 12 for one in microbatches]
        wanted = by_hand(model, microbatches) + 0.5 * sum(routers)
        self.assertAlmostEqual(sum(losses).item(), wanted.item(), places=5)
        model, Routed.router_aux_loss_coef = Routed(), None
        self.addCleanup(setattr, Routed, "router_aux_loss_coef", 0.5)
        with self.assertRaisesRegex(ValueError, "Routed returns an `aux_loss`.*router_aux_loss_coef"):
            dflop.torch.loss(model, microbatches[2])

    def test_large_vocabularies_are_computed_in_parts(self) -> None:
        with mock.patch.object(token_loss, "CHUNK_VALUES", 3 * WORDS):
            self.check(Toy(), parts())

    def test_half_precision_has_a_loss_in_single_precision(self) -> None:
        model = Toy().to(torch.bfloat16)
        microbatches = parts()
        losses = [dflop.torch.loss(model, one) for one in microbatches]
        self.assertEqual({one.dtype for one in losses}, {torch.float32})
        logits = [model(one["input_ids"]).logits.float() for one in microbatches]
        wanted = by_hand(lambda ids: Output(logits.pop(0)), microbatches)
        self.assertAlmostEqual(sum(losses).item(), wanted.item(), places=5)


class Refused(unittest.TestCase):
    def setUp(self) -> None:
        self.one = parts()[0]

    def test_a_loss_that_is_no_mean_cross_entropy_is_refused_by_the_name_of_the_model(self) -> None:
        with self.assertRaisesRegex(ValueError, "Smoothed has a loss of its own, .*loss_scale_sum"):
            dflop.torch.loss(Smoothed(), self.one)

    def test_outputs_without_logits_are_refused(self) -> None:
        for returned in (torch.zeros(()), (torch.zeros(()), torch.zeros(1, 5, WORDS))):
            with self.assertRaisesRegex(TypeError, "returned .* without `logits` or `loss`.*loss_scale_sum"):
                dflop.torch.loss(lambda value=returned, **inputs: value, self.one)

    def test_mappings_without_attributes_are_refused(self) -> None:
        rebuilt = type(self.one)(dict(self.one))
        with self.assertRaisesRegex(TypeError, "found Microbatch without its attributes.*to\\(device\\)"):
            dflop.torch.loss(Toy(), rebuilt)
        with self.assertRaisesRegex(ValueError, "no `labels`, only input_ids"):
            dflop.torch.loss(Toy(), dflop.Microbatch({"input_ids": self.one["input_ids"]}))
        with self.assertRaisesRegex(TypeError, 'array_type="torch"'):
            dflop.torch.loss(Toy(), dflop.Microbatch({"labels": self.one["labels"].numpy()}))

    def test_a_step_of_another_microbatch_is_refused(self) -> None:
        step = dflop.Step(4, [self.one], 12, "", 0.0, 0.0)
        dflop.torch.loss(Toy(), self.one, step)
        other = dflop.Step(5, [self.one], 17, "", 0.0, 0.0)
        with self.assertRaisesRegex(ValueError, "not of step 5, which has 17 targets: its own has 12"):
            dflop.torch.loss(Toy(), self.one, other)

    def test_targets_that_the_plan_does_not_count_are_named(self) -> None:
        self.one.loss_scale_sum = 0.0
        with self.assertRaisesRegex(ValueError, "counts no target .* the microbatch has 2: .*count_targets"):
            dflop.torch.loss(Toy(), self.one)
        counted = dflop.torch.count_targets(dflop.Step(0, parts(), 0, "", 0.0, 0.0))
        self.assertEqual(counted.target_tokens, 12)
        model = Toy()
        losses = [dflop.torch.loss(model, one, counted) for one in counted.microbatches]
        self.assertAlmostEqual(sum(losses).item(), by_hand(model, parts()).item(), places=5)

    def test_counted_targets_take_the_place_of_planned_ones(self) -> None:
        step = dflop.Step(0, [microbatch([[1, 2, 3]], [2], 30), microbatch([[4, 5]], [1], 30)], 30, "", 0, 0)
        counted = dflop.torch.count_targets(step)
        self.assertEqual((counted.target_tokens, step.target_tokens), (3, 30))
        scales = [(one.loss_scale_sum, one.loss_scale) for one in counted.microbatches]
        self.assertEqual(scales, [(1 / 3, 2 / 3), (1 / 3, 1 / 3)])
        two_ranks = dflop.Step(0, [microbatch([[1, 2, 3]], [2], 30, ranks=2)], 30, "", 0, 0)
        with self.assertRaisesRegex(ValueError, "1 ranks, but the loader has dp_size=2"):
            dflop.torch.count_targets(two_ranks)


class WithoutTargets(WithData):
    def test_a_model_of_transformers_has_a_loss_of_0_and_gradients_of_0(self) -> None:
        (step,) = (one.hold() for one in pytorch.loader_of(self.directory, steps=1))
        model, one = pytorch.model_of(self.directory), step.microbatches[0]
        one["labels"] = torch.full_like(one["labels"], IGNORED)
        one.target_tokens, one.loss_scale = 0, 0.0
        self.assertTrue(torch.isnan(model(**one).loss * one.loss_scale))
        loss = dflop.torch.loss(model, one, step)
        loss.backward()
        self.assertEqual(loss.item(), 0.0)
        gradients = [parameter.grad for parameter in model.parameters()]
        self.assertTrue(all(gradient is not None and not gradient.any() for gradient in gradients))

    def test_adapters_of_peft_are_seen_through(self) -> None:
        try:
            import peft
        except ImportError as missing:
            raise unittest.SkipTest(f"{missing.name} is not installed") from missing
        (step,) = (one.hold() for one in pytorch.loader_of(self.directory, steps=1))
        model = pytorch.model_of(self.directory)
        wanted = sum(dflop.torch.loss(model, one, step).item() for one in step.microbatches)
        adapters = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        self.assertIs(token_loss.unwrapped(adapters), adapters.get_base_model())
        found = sum(dflop.torch.loss(adapters, one, step).item() for one in step.microbatches)
        self.assertAlmostEqual(found, wanted, places=5)


if __name__ == "__main__":
    unittest.main()
