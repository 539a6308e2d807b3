"""Checks the Kubernetes manifests of the documents against the generated models of the Kubernetes client.

    venv/bin/python tests/python/manifests.py docs/multi-node

Fields and types of core objects come from the package `kubernetes`: metadata, and the templates of jobs and pods
inside of JobSets and PyTorchJobs. Their own fields have no schema in that package; a list here names those in use.
Also checks that volumes that are mounted exist, and that a rank gets the variables of the environment contract.
"""

import copy
import re
import sys
from pathlib import Path

import yaml
from kubernetes import client

# Fields that a job kind has of its own; `*` stands for any name, a model for the rest of the way.
KINDS = {
    "JobSet": {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "metadata": "V1ObjectMeta",
        "spec.network.enableDNSHostnames": "bool",
        "spec.failurePolicy.maxRestarts": "int",
        "spec.replicatedJobs.*.name": "str",
        "spec.replicatedJobs.*.replicas": "int",
        "spec.replicatedJobs.*.template": "V1JobTemplateSpec",
    },
    "PyTorchJob": {
        "apiVersion": "kubeflow.org/v1",
        "metadata": "V1ObjectMeta",
        "spec.runPolicy.backoffLimit": "int",
        "spec.runPolicy.cleanPodPolicy": "str",
        "spec.pytorchReplicaSpecs.*.replicas": "int",
        "spec.pytorchReplicaSpecs.*.restartPolicy": "str",
        "spec.pytorchReplicaSpecs.*.template": "V1PodTemplateSpec",
    },
}
SCALARS = {"str": str, "int": int, "bool": bool, "float": float}
# Variables that the operator of a kind sets in the containers.
SET_BY_OPERATOR = {"JobSet": set(), "PyTorchJob": {"RANK", "WORLD_SIZE", "MASTER_ADDR"}}
CONTRACT = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "DFLOP_JOB_TOKEN"}


def check(value, kind, place):
    """Yields the faults of a value that should have a type of the client."""
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{place}: expected a list"
            return
        for number, item in enumerate(value):
            yield from check(item, match[1], f"{place}[{number}]")
    elif match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        for name, item in value.items():
            yield from check(item, match[1], f"{place}.{name}")
    elif kind in SCALARS:
        if type(value) is not SCALARS[kind]:
            yield f"{place}: expected {kind}, found {value!r}"
    elif kind not in ("object", "datetime"):
        yield from check_model(value, getattr(client, kind), place)


def check_model(value, model, place):
    """Yields unknown fields, missing fields and faults of all fields of an object."""
    if not isinstance(value, dict):
        yield f"{place}: expected an object"
        return
    names = {name: attribute for attribute, name in model.attribute_map.items()}
    for name, item in value.items():
        if name in names:
            yield from check(item, model.openapi_types[names[name]], f"{place}.{name}")
        else:
            yield f"{place}: {model.__name__} has no field `{name}`"
    known = {names[name]: item for name, item in value.items() if name in names}
    try:
        model(**known)
    except ValueError as error:
        yield f"{place}: {error}"


def check_own(value, fields, path, place):
    """Yields the faults of an object of a kind whose fields are listed."""
    if path in fields:
        yield from check(value, fields[path], place)
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            paths = [f"{path}.{name}", f"{path}.*"]
            found = [own for own in paths if any(f"{field}.".startswith(f"{own}.") for field in fields)]
            if found:
                yield from check_own(item, fields, found[0], f"{place}.{name}")
            else:
                yield f"{place}: unknown field `{name}`"
    else:
        yield f"{place}: expected an object"


def pods(document):
    """Yields the pod specifications inside of a document."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        for item in document.values():
            yield from pods(item)
    elif isinstance(document, list):
        for item in document:
            yield from pods(item)


def check_document(document, name):
    """Returns the faults of a manifest."""
    kind = document.get("kind")
    if kind not in KINDS:
        return [f"{name}: unknown kind `{kind}`"]
    fields = KINDS[kind]
    faults = []
    if document.get("apiVersion") != fields["apiVersion"]:
        faults.append(f"{name}: expected apiVersion {fields['apiVersion']}")
    for part in ["metadata", "spec"]:
        faults += check_own(document[part], fields, part, f"{name}: {part}")
    ranks = list(pods(document))
    if not ranks:
        faults.append(f"{name}: no pod")
    for pod in ranks:
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            faults += [f"{name}: no volume `{volume}`" for volume in sorted(mounted - volumes)]
            variables = {variable["name"] for variable in container.get("env", [])} | SET_BY_OPERATOR[kind]
            faults += [f"{name}: no variable `{variable}`" for variable in sorted(CONTRACT - variables)]
    return faults


def damaged(document):
    """Yields copies with one fault each, and words of what must be found."""
    for words, change in [
        ("has no field `imagee`", lambda pod: pod["containers"][0].update(imagee="x")),
        ("expected int", lambda pod: pod.update(terminationGracePeriodSeconds="60")),
        ("`name`", lambda pod: pod["containers"][0].pop("name")),
        ("no volume `job`", lambda pod: pod["volumes"].pop(0)),
        ("no variable `DFLOP_JOB_TOKEN`", lambda pod: pod["containers"][0]["env"].pop()),
    ]:
        copied = copy.deepcopy(document)
        change(next(pods(copied)))
        yield words, copied
    yield "unknown field `speed`", document | {"spec": document["spec"] | {"speed": 1}}


def main():
    """Checks all manifests of a directory, and that faults are found."""
    paths = sorted(Path(sys.argv[1]).glob("*.yaml"))
    assert paths, "there are manifests"
    faults = []
    for path in paths:
        for document in yaml.safe_load_all(path.read_text()):
            found = check_document(document, path.name)
            faults += found
            for words, broken in damaged(document):
                assert any(words in fault for fault in check_document(broken, path.name)), (path.name, words)
            print(f"{path.name}: {document['kind']}, {len(found)} faults")
    for fault in faults:
        print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
