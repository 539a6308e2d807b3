"""Counts the graphs that `torch.compile` makes of microbatches, and the padding, by setting of the buckets.

    python benches/compiled_shapes.py --shards DIRECTORY --model DIRECTORY [--out FILE]

The functions are an embedding with a head, and a linear layer over patches, which see the same shapes as a
language model and a vision tower. Needs the package `dflop` and PyTorch.
"""

import argparse
import pathlib

import dflop
import torch
import torch._dynamo as dynamo

PROCESSORS = {
    "as they come": dflop.Processor(),
    "fixed:3000": dflop.Processor(length_buckets="fixed:3000"),
    "ladders": dflop.Processor(length_buckets="ladder", media_buckets="ladder"),
    "multiples of 256 tokens and 512 patches": dflop.Processor(length_buckets=256, media_buckets=512),
}


def graphs(microbatches: list, name: str) -> int:
    """Returns the graphs of a compiled function of one tensor of all microbatches."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    dynamo.config.recompile_limit = dynamo.config.cache_size_limit = 256
    function = torch.compile(lambda values: (values * 2).sum(), dynamic=False, backend="eager")
    for microbatch in microbatches:
        if name in microbatch:
            function(microbatch[name])
    return dynamo.utils.counters["stats"]["unique_graphs"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    dataset = dflop.Dataset(arguments.shards)
    lines, patches_as_they_come = [], 0
    for name, processor in PROCESSORS.items():
        common = {"global_batch_size": 32, "microbatches": 4, "steps": 10, "array_type": "torch"}
        loader = dflop.BalancedLoader(dataset, model=arguments.model, processor=processor, **common)
        microbatches = [microbatch for step in loader for microbatch in step.microbatches]
        padding = sum(one.padding_tokens for one in microbatches)
        tokens = sum(one.tokens for one in microbatches)
        patches = sum(one["pixel_values"].shape[0] for one in microbatches if "pixel_values" in one)
        patches_as_they_come = patches_as_they_come or patches
        lines.append(
            f"{name}: {len(microbatches)} microbatches; {graphs(microbatches, 'input_ids')} graphs of ids at "
            f"{padding / (padding + tokens):.1%} padding; {graphs(microbatches, 'pixel_values')} graphs of patches at "
            f"{1 - patches_as_they_come / patches:.1%} padding"
        )
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
