"""Compares recorded truth with a second recording of it: one line of differences per family and file."""

import gzip
import json


def changes_of(old, new):
    """Returns, by family, lines of how the files below `new` differ from those of the same path below `old`."""
    found = {}
    for path in sorted(path for path in new.rglob("*") if path.is_file()):
        name = path.relative_to(new)
        if name.parts[0] == "versions":
            continue
        before = old / name
        for family, line in file_changes(name, before.read_bytes() if before.is_file() else None, path.read_bytes()):
            found.setdefault(family, [])
            if line:
                found[family].append(f"{name}: {line}")
    return found


def file_changes(name, before, after):
    """Yields pairs of a family and a difference, or no difference as an empty text."""
    family = name.parts[1] if name.parts[0] == "executor" and len(name.parts) > 2 else name.name.split(".")[0]
    if before is None:
        yield family, "is new"
    elif before == after:
        yield family, ""
    elif name.name.endswith(".csv.gz"):
        yield family, line_changes(gzip.decompress(before).decode(), gzip.decompress(after).decode())
    elif name.suffix == ".json":
        yield from json_changes(family, json.loads(before), json.loads(after))
    elif name.suffix == ".safetensors":
        yield family, tensor_changes(before, after)
    else:
        yield family, "differs"


def line_changes(before, after):
    before, after = before.splitlines(), after.splitlines()
    differ = [(one, two) for one, two in zip(before, after) if one != two]
    if len(before) != len(after):
        return f"{len(after)} lines, {len(before)} before"
    return f"{len(differ)} of {len(after)} lines differ, first {differ[0][0]} → {differ[0][1]}" if differ else ""


def json_changes(family, before, after):
    """Compares cases one by one, under the family or name that they carry; versions may differ."""
    cases = [value.get("cases", value) if isinstance(value, dict) else value for value in (before, after)]
    if not all(isinstance(value, list) for value in cases):
        yield family, difference(before, after)
        return
    totals, differing = {}, {}
    for one, two in zip(*cases):
        name = two.get("family") or two.get("name") or family
        totals[name] = totals.get(name, 0) + 1
        found = difference(one, two)
        if found:
            differing.setdefault(name, []).append(found)
    if len(cases[0]) != len(cases[1]):
        yield family, f"{len(cases[1])} cases, {len(cases[0])} before"
    for name, total in totals.items():
        lines = differing.get(name, [])
        yield name, f"{len(lines)} of {total} cases differ, first at {lines[0]}" if lines else ""


def difference(one, two, at=""):
    """Returns the first place where two JSON values differ, and both values there; empty if there is none."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in [*one, *(key for key in two if key not in one)]:
            if key == "versions":
                continue
            if key not in one or key not in two:
                return f"{at}.{key}: " + ("is new" if key not in one else "is missing")
            found = difference(one[key], two[key], f"{at}.{key}")
            if found:
                return found
        return ""
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for index, pair in enumerate(zip(one, two)):
            found = difference(*pair, f"{at}[{index}]")
            if found:
                return found
        return ""
    return "" if one == two else f"{at}: {str(one)[:60]} → {str(two)[:60]}"


def tensor_changes(before, after):
    """Compares tensors by name: the largest difference over the largest value."""
    from safetensors.numpy import load

    try:
        one, two = load(before), load(after)
    except Exception:  # NumPy has no bf16.
        return "weights differ"
    if one.keys() != two.keys():
        return f"tensors {sorted(one.keys() ^ two.keys())} only in one"
    worst, where = 0.0, ""
    for name in one:
        if one[name].shape != two[name].shape:
            return f"shape of {name}: {one[name].shape} → {two[name].shape}"
        scale = max(abs(one[name]).max(initial=0), 1e-30)
        apart = float(abs(one[name].astype("f8") - two[name].astype("f8")).max(initial=0) / scale)
        if apart > worst:
            worst, where = apart, name
    return f"{worst:.1e} of the largest value apart, at {where}" if worst > 0 else ""
