"""Holds every rendered custom resource to its whole CustomResourceDefinition, unknown fields included.

    kubectl get crd -o yaml > crds.yaml && python -m tests.deploy.published crds.yaml

takes those of a cluster; files of the projects' releases do as well. Rules in CEL are left to the cluster.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.rendered import KUSTOMIZE, render

Schemas = dict[tuple[str, str], dict[str, Any]]  # (apiVersion, kind) ->


def read(files: Sequence[Path]) -> Schemas:
    """The schemas of the definitions in files, or in lists in them."""
    found: Schemas = {}
    for file in files:
        for document in yaml.safe_load_all(file.read_text()):
            for each in (document or {}).get("items", [document]):
                if each and each["kind"] == "CustomResourceDefinition":
                    spec = each["spec"]
                    for version in spec["versions"]:
                        schema = version["schema"]["openAPIV3Schema"]
                        key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                        found[key] = _closed(schema) | {"required": ["apiVersion", "kind", "metadata", "spec"]}
    return found


def _closed(schema: Any) -> Any:
    """The schema as an API server applies it: with no field but those that it lists."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def problems(objects: Sequence[dict[str, Any]], schemas: Schemas) -> Iterator[str]:
    """What the schemas do not allow of the objects that they are for."""
    validator = importlib.import_module("jsonschema").Draft202012Validator  # comes with kubernetes-validate
    for each in objects:
        if schema := schemas.get((each["apiVersion"], each["kind"])):
            for problem in validator(schema).iter_errors(each):
                where = ".".join(map(str, problem.absolute_path))
                yield f"{each['kind']} {each['metadata']['name']}: {where}: {problem.message}"


def main() -> int:
    schemas = read([Path(name) for name in sys.argv[1:]])
    checked, wrong = set(), []
    for folder in sorted(str(path.parent.relative_to(KUSTOMIZE)) for path in KUSTOMIZE.rglob("kustomization.yaml")):
        if not folder.startswith("components"):
            objects = render(folder)
            wrong += [f"{folder}: {each}" for each in problems(objects, schemas)]
            checked |= {each["kind"] for each in objects if (each["apiVersion"], each["kind"]) in schemas}
    print("\n".join(wrong) or f"all is allowed; checked: {', '.join(sorted(checked)) or 'nothing'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
