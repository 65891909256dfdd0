# mypy: ignore-errors
# ruff: noqa
"""Runs on the target through its Python's stdin: the arguments of the installed SGLang, read from its source without
importing it.

    python -I - SITE_PARENT        (a venv's lib folder, or a folder that holds sglang)

Standard library only, Python >= 3.8. Prints one JSON object, or null when no SGLang is there.
"""

import ast
import glob
import json
import os
import sys


def package(parent):
    for base in [parent] + sorted(glob.glob(os.path.join(parent, "python*", "site-packages"))):
        if os.path.isfile(os.path.join(base, "sglang", "srt", "server_args.py")):
            return os.path.join(base, "sglang")
    return None


def literals(node):
    """Texts of a list, tuple or set display; None when it is anything else."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        if all(isinstance(item, ast.Constant) for item in node.elts):
            return [item.value for item in node.elts if item.value is not None]
    return None


def constants(trees):
    """Lists at the top of a module, by name. One that code adds to (plugins) is still what the release knows."""
    found = {}
    for tree in trees:
        for node in tree.body:
            target = None
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
            elif isinstance(node, ast.AnnAssign):
                target = node.target
            if isinstance(target, ast.Name) and node.value is not None:
                values = literals(node.value)
                if values is not None:
                    found[target.id] = values
    return found


def keywords(call, names):
    """Keyword arguments of a call as texts, lists or booleans; names of module constants are looked up."""
    found = {}
    for word in call.keywords:
        if word.arg is None:
            continue
        value = word.value
        if isinstance(value, ast.Constant):
            found[word.arg] = value.value
        elif isinstance(value, ast.Name):
            found[word.arg] = names.get(value.id, "<%s>" % value.id)
        elif literals(value) is not None:
            found[word.arg] = literals(value)
        else:
            found[word.arg] = "<%s>" % type(value).__name__
    return found


def entry(words, kind=None):
    """One flag: ``takes`` none, one, many or maybe; ``choices`` when the release lists them; ``new`` its replacement."""
    action, nargs = str(words.get("action", "")), words.get("nargs")
    choices = words.get("choices")
    takes = "one"
    if action in ("store_true", "store_false", "store_const", "help", "version", "count"):
        takes = "none"
    elif "StoreTrue" in action or "StoreConst" in action or "DeprecatedAction" in action:
        takes = "none"
    elif "BooleanOptional" in action:
        takes = "none"
    elif nargs in ("+", "*") or (nargs is None and kind == "list"):
        takes = "many"
    elif nargs == "?":
        takes = "maybe"
    elif kind == "bool" and not words.get("type_parser"):
        takes = "none"
    item = {"takes": takes}
    if isinstance(choices, list) and choices:
        item["choices"] = [str(c) for c in choices]
    if "Deprecated" in action:
        item["deprecated"] = True
        new = words.get("new_flag")
        if isinstance(new, str) and not new.startswith("<"):
            item["new"] = new
    return item


def kind_of(annotation):
    """bool, list or None from a field's type."""
    text = ast.dump(annotation)
    if isinstance(annotation, ast.Name):
        return "bool" if annotation.id == "bool" else None
    if isinstance(annotation, ast.Subscript):
        head = annotation.value
        name = head.id if isinstance(head, ast.Name) else getattr(head, "attr", "")
        inner = annotation.slice
        inner = getattr(inner, "value", inner) if type(inner).__name__ == "Index" else inner
        if name == "Optional":
            return kind_of(inner)
        if name in ("List", "list", "Sequence"):
            return "list"
        if name == "Union" and "List" in text:
            return "list"
    return None


def shape_of(annotation):
    """(number type, listed choices) of a field's type: int, float or None; the texts of a Literal or None."""
    if isinstance(annotation, ast.Name):
        return (annotation.id if annotation.id in ("int", "float") else None), None
    if isinstance(annotation, ast.Subscript):
        name = getattr(annotation.value, "id", getattr(annotation.value, "attr", ""))
        inner = annotation.slice
        inner = getattr(inner, "value", inner) if type(inner).__name__ == "Index" else inner
        if name == "Optional":
            return shape_of(inner)
        if name == "Literal":
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if all(isinstance(part, ast.Constant) for part in parts):
                return None, [str(part.value) for part in parts if part.value is not None]
    return None, None


def of_field(node, names):
    """(flags, entry) of a dataclass field that is annotated with its argument; None when it is none."""
    if not isinstance(node.target, ast.Name):
        return None
    note = node.annotation
    if (
        not isinstance(note, ast.Subscript)
        or not isinstance(note.value, ast.Name)
        or note.value.id not in ("A", "Annotated")
    ):
        return None
    inner = note.slice
    inner = getattr(inner, "value", inner) if type(inner).__name__ == "Index" else inner
    if not isinstance(inner, ast.Tuple):
        return None
    words = {}
    for part in inner.elts[1:]:
        if isinstance(part, ast.Call):
            words.update(keywords(part, names))
    if words.get("no_cli"):
        return None
    flag = words.get("cli_name") or "--" + node.target.id.replace("_", "-")
    flag = flag if flag.startswith("-") else "--" + flag
    aliases = words.get("aliases")
    flags = [flag] + (aliases if isinstance(aliases, list) else [])
    kind = kind_of(inner.elts[0])
    item = entry(words, kind)
    if kind == "bool" and not words.get("action"):
        item["takes"] = "none"
    if words.get("type_parser") and item["takes"] == "many" and not words.get("nargs"):
        item["takes"] = "one"  # parsed from one word
    number, choices = shape_of(inner.elts[0])
    if number and item["takes"] == "one" and not words.get("type_parser"):
        item["number"] = number
    if choices and "choices" not in item and "choices" not in words:
        item["choices"] = choices
    if "BooleanOptional" in str(words.get("action", "")):
        flags += ["--no-" + flag[2:] for flag in list(flags) if flag.startswith("--")]
    return flags, item


def read(path):
    with open(path, "rb") as file:
        return ast.parse(file.read())


def main():
    root = package(sys.argv[1])
    if root is None:
        print("null")
        return
    paths = [os.path.join(root, "srt", "server_args.py")]
    paths += sorted(glob.glob(os.path.join(root, "srt", "arg_groups", "**", "*.py"), recursive=True))
    trees = []
    for path in paths:
        try:
            trees.append(read(path))
        except (OSError, SyntaxError, ValueError):
            continue
    names, flags = constants(trees), {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    found = of_field(item, names) if isinstance(item, ast.AnnAssign) else None
                    if found is not None:
                        for flag in found[0]:
                            flags.setdefault(flag, found[1])
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                words = keywords(node, names)
                item = entry(words)
                if words.get("type") in ("<int>", "<float>") and item["takes"] == "one":
                    item["number"] = words["type"][1:-1]
                for part in node.args:
                    if isinstance(part, ast.Constant) and str(part.value).startswith("-"):
                        flags[part.value] = item
    version = None
    for meta in glob.glob(os.path.join(os.path.dirname(root), "sglang-*.dist-info")):
        version = os.path.basename(meta)[len("sglang-") : -len(".dist-info")]
    print(json.dumps({"version": version, "flags": flags}))


if __name__ == "__main__":
    main()
