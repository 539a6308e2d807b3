"""Writes the pages of the Python API: one directive for each public name, which mkdocstrings fills."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import griffe
from repository import GENERATOR


class Group(NamedTuple):
    """A page of the API: names of one module that belong together."""

    file: str
    title: str
    about: str
    module: str
    names: tuple[str, ...]


GROUPS = (
    Group(
        "loaders",
        "Loaders",
        "Deliver samples and balanced microbatches.",
        "dflop",
        ("Loader", "BalancedLoader", "SharedLoader", "BatchIterator", "StepIterator"),
    ),
    Group(
        "datasets",
        "Datasets",
        "Shards with their index, and mixtures of them.",
        "dflop",
        ("Dataset", "Mixture", "mix", "Table"),
    ),
    Group(
        "settings",
        "Settings",
        "Settings of the loaders, in groups, and functions of your own.",
        "dflop",
        (
            "Plan",
            "Order",
            "Processor",
            "CustomProcessor",
            "Read",
            "Image",
            "Augment",
            "Transform",
            "SampleTransform",
        ),
    ),
    Group(
        "batches",
        "Batches and steps",
        "Classes that the loaders deliver.",
        "dflop",
        ("Step", "Microbatch", "StepPlan", "Sample", "Batch", "Medium", "Audio", "Video", "Array"),
    ),
    Group(
        "costs",
        "Costs and plans",
        "Predict costs, and answer what the planning commands answer.",
        "dflop",
        (
            "CostModel",
            "ModelDescription",
            "Custom",
            "stats",
            "plan",
            "simulate",
            "balance",
            "models",
            "profile",
        ),
    ),
    Group(
        "data-in",
        "Data in",
        "Make shards and their index.",
        "dflop",
        (
            "Writer",
            "from_huggingface",
            "from_image_folder",
            "from_jsonl",
            "from_litdata",
            "from_mds",
            "from_parquet",
            "index",
            "pack",
        ),
    ),
    Group(
        "errors",
        "Errors",
        "Exceptions, by what the caller does next.",
        "dflop",
        (
            "Error",
            "ConfigError",
            "DataError",
            "ErrorBudgetError",
            "ForkError",
            "ModelError",
            "PlanError",
            "ReadError",
            "SharedError",
            "StageError",
            "StalledError",
            "StateError",
            "UserCodeError",
        ),
    ),
    Group(
        "torch",
        "dflop.torch",
        "",
        "dflop.torch",
        (
            "IterableDataset",
            "Microbatches",
            "StageTimer",
            "Trace",
            "profile",
            "Profile",
            "pin",
            "HostRegistry",
            "shared_loader",
            "keep",
            "MegatronIterator",
            "megatron_batch",
            "megatron_bridge_provider",
            "TitanDataLoader",
            "assign_media",
            "encoder_cost_fn",
        ),
    ),
    Group(
        "monitor",
        "dflop.monitor",
        "",
        "dflop.monitor",
        ("Progress", "Record", "steps", "serve", "Server", "text", "log", "scalars"),
    ),
    Group(
        "hugging_face",
        "dflop.hugging_face",
        "",
        "dflop.hugging_face",
        ("Inputs", "TokenCounts", "messages_of", "media_of", "aligned"),
    ),
    Group(
        "example",
        "dflop.example",
        "",
        "dflop.example",
        ("directory", "on_ranks", "write_shards", "write_model"),
    ),
)
# Names of the package that are no page's content: modules with pages of their own, and the version.
OTHERS = {"__version__", "example", "hugging_face", "monitor", "torch"}


class ApiError(Exception):
    """A public name is on no page, or on two."""


def write(pages: Path, package: Path) -> list[Path]:
    """Writes all pages of the API below a directory, and returns their places in it.

    ``package`` is the directory that the package is read from; it is importable, too.

    Raises:
        ApiError: a public name is missing, or a page has a name that is not public.
    """
    check()
    directory = pages / "api"
    directory.mkdir(parents=True, exist_ok=True)
    for group in GROUPS:
        (directory / f"{group.file}.md").write_text(page(group), encoding="utf-8")
    (directory / "index.md").write_text(overview(package), encoding="utf-8")
    return [Path("api/index.md"), *(Path(f"api/{group.file}.md") for group in GROUPS)]


def check() -> None:
    """Compares the pages with the public names of each module.

    Raises:
        ApiError: a public name is missing, or a page has a name that is not public.
    """
    for module in {group.module for group in GROUPS}:
        listed = [name for group in GROUPS if group.module == module for name in group.names]
        public = public_names(module)
        faults = {name for name in listed if listed.count(name) > 1} | (set(listed) ^ public)
        if faults:
            raise ApiError(f"docs/site/api_pages.py lists {module}.{sorted(faults)} not once, or not at all")


def public_names(module: str) -> set[str]:
    """Returns the public names of a module: ``__all__``, or the functions and classes it defines."""
    loaded = import_module(module)
    if hasattr(loaded, "__all__"):
        return set(loaded.__all__) - OTHERS
    own = inspect.getmembers(loaded, lambda one: getattr(one, "__module__", None) == module and callable(one))
    return {name for name, _ in own if not name.startswith("_") and name != "Message"}


def page(group: Group) -> str:
    """Returns the page of a group."""
    about = group.about or inspect.getdoc(import_module(group.module)) or ""
    # Names in a module's documentation link to their section.
    for name in group.names:
        about = about.replace(f"`{name}`", f"[`{name}`][{group.module}.{name}]")
    directives = "\n\n".join(f"::: {group.module}.{name}" for name in group.names)
    return f"# {group.title}\n\n{about}\n\n{directives}\n"


def overview(package: Path) -> str:
    """Returns the page that lists every public name with the first sentence of its documentation."""
    extensions = griffe.load_extensions(GENERATOR / "griffe_dflop.py")
    read = griffe.load("dflop", search_paths=[package], extensions=extensions, allow_inspection=False)
    text = [
        "# Python API",
        "",
        "Every public name, with the signatures of the stubs that type checkers read.",
        "",
    ]
    for group in GROUPS:
        text += [f"## [{group.title}]({group.file}.md)", "", "| name | does |", "| --- | --- |"]
        within = read if group.module == "dflop" else read[group.module.removeprefix("dflop.")]
        for name in group.names:
            docstring = within[name].docstring
            if docstring is None:
                raise ApiError(f"{group.module}.{name} has no docstring")
            text.append(f"| [`{name}`][{group.module}.{name}] | {summary(docstring.value)} |")
        text.append("")
    return "\n".join(text)


def summary(documentation: str) -> str:
    """Returns the first sentence, without its full stop."""
    paragraph = documentation.split("\n\n")[0].replace("\n", " ")
    return paragraph.split(". ")[0].replace("|", "\\|").rstrip(".:")
